"""Two workers beside one, each on a core of its own and with as large a batch (weak scaling).

Efficiency is the steps/s of two workers over those of one: a step of two trains on twice the data.
Two workers apart, which exchange nothing, tell what the machine leaves of it: beside them, ours is
what the exchange leaves. PyTorch's DDP is the
peer: two ranks over Gloo, on one core each as well.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from rich.table import Table

from benchmarks.cases import Case, Environments, Place, Side
from benchmarks.report import Row, make_row
from benchmarks.runner import Measurement, paired_ratios
from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import WORKLOADS

__all__ = [
    "APART",
    "DDP",
    "EFFICIENCY",
    "FIT",
    "WANTED",
    "make_cases",
    "make_rows",
    "make_table",
]

EFFICIENCY = "efficiency"
FIT, APART, DDP = "fit", "fit, apart", "PyTorch DDP"
# What an efficiency should at least be.
WANTED = {"mlp": 0.85, "cnn": 0.95, "transformer": 0.95}

_NUM_WORKERS = 2


def _names(kind: str) -> tuple[str, str]:
    """What the sides of one worker and of several are called."""
    return f"{kind}, 1 worker", f"{kind}, {_NUM_WORKERS} workers"


# What is compared, and what its sides of one worker and of several are called. Workers apart are
# measured against the same one that works alone.
_KINDS = (
    (FIT, *_names(FIT)),
    (APART, _names(FIT)[0], _names(APART)[1]),
    (DDP, *_names(DDP)),
)


def make_cases(places: Sequence[Place], environments: Environments) -> list[Case]:
    """Returns a case for each workload and way to call.

    None where there are not two cores to keep workers on, or where one did not ask for two CPUs.
    """
    if Place("cpu", _NUM_WORKERS) not in places or not _has_cores():
        return []
    return [
        _case("mlp", 128, WORKLOADS["mlp"].cpu_steps_per_call),
        _case("mlp", 128, 1),
        _case("cnn", 128, WORKLOADS["cnn"].cpu_steps_per_call),
        _case("transformer", 64, WORKLOADS["transformer"].cpu_steps_per_call),
    ]


def make_rows(case: Case, measurements: Sequence[Measurement]) -> list[Row]:
    """Returns the efficiencies of a case, and ours beside the others', as far as was measured."""
    speeds = {measured.side.name: measured.steps_per_s for measured in measurements}
    efficiencies = {
        kind: paired_ratios(speeds[two], speeds[one])
        for kind, one, two in _KINDS
        if one in speeds and two in speeds
    }
    rows = [
        {
            **make_row(case.name, speeds[two], speeds[one], one, EFFICIENCY),
            "side": kind,
            "compared": f"{kind}: {_NUM_WORKERS} workers / 1",
            "has_peer": False,
        }
        for kind, one, two in _KINDS
        if kind in efficiencies
    ]
    rows[0]["wanted"] = WANTED[case.ours.options.workload]
    for kind, ratios in efficiencies.items():
        if kind != FIT:
            row = make_row(case.name, efficiencies[FIT], ratios, kind, "efficiencies")
            compared = f"{FIT} / {kind}, efficiency"
            rows.append({**row, "side": FIT, "compared": compared, "has_peer": False})
    if DDP in efficiencies:
        ours, peer = _names(FIT)[1], _names(DDP)[1]
        row = make_row(case.name, speeds[ours], speeds[peer], peer)
        compared = f"{FIT} / {DDP}, {_NUM_WORKERS} workers"
        rows.append({**row, "side": FIT, "compared": compared})
    return rows


def make_table(benchmark: str, rows: Sequence[Row]) -> Table:
    title = f"{benchmark}: efficiency of {_NUM_WORKERS} workers on a core each, medians of rounds"
    table = Table(title=title, title_justify="left")
    for header in ("case", "compared"):
        table.add_column(header)
    for header in ("first", "second", "ratio", "min", "max", "wanted"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = None
    for row in rows:
        if previous not in (None, row["case"]):
            table.add_section()
        table.add_row(
            row["case"] if row["case"] != previous else "",
            row["compared"],
            *(_number(row[key]) for key in ("ours", "reference")),
            _colored(row),
            f"{row['ratio_min']:.3f}",
            f"{row['ratio_max']:.3f}",
            f"{row['wanted']:.2f}" if "wanted" in row else "",
        )
        previous = row["case"]
    return table


def _has_cores() -> bool:
    """Only Linux lets a process choose its core."""
    return hasattr(os, "sched_setaffinity") and len(os.sched_getaffinity(0)) >= _NUM_WORKERS


def _case(workload: str, batch_size: int, steps_per_call: int) -> Case:
    """A case with so many examples a worker."""
    one, two = _names(FIT)
    peer_one, peer_two = _names(DDP)
    arguments = (workload, batch_size, steps_per_call)
    return Case(
        name=f"{WORKLOADS[workload].title}, {batch_size} a worker, {steps_per_call} a call",
        ours=_fit_side(two, _NUM_WORKERS, *arguments),
        references=(
            _fit_side(one, 1, *arguments),
            _fit_side(_names(APART)[1], _NUM_WORKERS, *arguments, apart=True),
            _torch_side(peer_two, _NUM_WORKERS, workload, batch_size),
            _torch_side(peer_one, 1, workload, batch_size),
        ),
        is_main=steps_per_call > 1,
    )


def _fit_side(
    name: str,
    num_workers: int,
    workload: str,
    batch_size: int,
    steps_per_call: int,
    *,
    apart: bool = False,
) -> Side:
    return Side(
        name=name,
        module="benchmarks.workers.pinned_workers",
        options=WorkerOptions(
            workload=workload,
            num_devices=num_workers,
            steps_per_call=steps_per_call,
            batch_size=batch_size if apart else batch_size * num_workers,
            pinned=True,
            apart=apart,
        ),
        variables={"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "TF_CONFIG": ""},
    )


def _torch_side(name: str, num_ranks: int, workload: str, batch_size: int) -> Side:
    return Side(
        name=name,
        module="benchmarks.workers.torch_ddp",
        options=WorkerOptions(
            workload=workload,
            num_devices=num_ranks,
            batch_size=batch_size * num_ranks,
            pinned=True,
        ),
        variables={"OMP_NUM_THREADS": "1"},
        environment="peers",
    )


def _number(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.3f}"


def _colored(row: Mapping[str, float]) -> str:
    color = "green" if row["ratio"] >= row.get("wanted", 1) else "yellow"
    return f"[bold {color}]{row['ratio']:.3f}[/]"
