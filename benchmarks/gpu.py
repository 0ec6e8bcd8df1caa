"""The project beside its peers on one GPU: speed, first step, compilation, memory.

`python -m benchmarks.gpu --output DIR [--only NAMES] [--budget-s N]`. A side is a process; they are
measured one after the other, because a large model fills the card. The results are written after
each, and a call with `--resume` measures only what is missing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from benchmarks.gpu_sides import WANTED, GpuSide, select
from benchmarks.report import Row, draw, make_row, make_table, write_json
from benchmarks.runner import Fleet, WorkerError
from benchmarks.sides import Environments
from benchmarks.workloads import GPU_WORKLOADS, tiny

_MAX_EPOCHS = 10_000
_LONG = ("key", "workload", "name", "is_ours", "versions", "profile")
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12}  # bf16, dense, per second


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How sides are run, as the options of the command line say."""

    output: Path
    cache: Path
    budget_s: float
    tiny: bool
    rounds: int
    round_s: float
    profile: bool
    gated: bool
    device_gb: float
    side_limit_s: float


class _Process:
    """The process of a side, from its start."""

    def __init__(self, one: GpuSide, plan: Plan) -> None:
        self.one, self._plan = one, plan
        self.begun_s = time.monotonic()
        platform = "cpu" if plan.tiny else "gpu"
        side = one.side.replaced(platform=platform, is_tiny=plan.tiny)
        self.fleet = Fleet(dataclasses.replace(side, variables=self._variables()), Environments())

    def _variables(self) -> dict[str, str]:
        cache = self._plan.cache.resolve()
        variables = {
            **self.one.side.variables,
            "PYTHONFAULTHANDLER": "1",
            "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_TRACEBACK_FILTERING": "off",
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "JAX_PLATFORMS": "cpu" if self._plan.tiny else "cuda,cpu",
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9",
        }
        if self._plan.tiny:
            variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if self._plan.gated:
            variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        return variables

    def measure(self, found: dict[str, Any], limit_s: float) -> None:
        """Adds the figures of the side, each as soon as it is there: what follows may fail."""
        end_s = time.monotonic() + limit_s

        def ask(**question: Any) -> dict[str, Any]:
            (answer,) = self.fleet.ask(question, max(1.0, end_s - time.monotonic()))
            return dict(answer)

        found["versions"] = self.fleet.read_answers(limit_s)[0]["versions"]
        waited_s = time.monotonic() - self.begun_s
        first = ask(epochs=1)
        found |= {name: first.get(name) for name in ("device_kind", "num_parameters")}
        found |= {"first_loss": first["loss"], "first_epoch_s": first["seconds"]}
        found["from_start_s"] = waited_s + first["seconds"]
        found |= _memory(first)
        if not self._plan.rounds:
            return
        second = ask(epochs=1)
        wanted = round(self._plan.round_s / second["seconds"])
        num_epochs = min(_MAX_EPOCHS, max(1, wanted))
        found["steps_per_s"] = []
        for _ in range(self._plan.rounds):
            told = ask(epochs=num_epochs)
            found["steps_per_s"].append(told["steps"] / told["seconds"])
            found |= {"last_loss": told["loss"], **_memory(told)}
        if self._plan.profile:
            found["profile"] = ask(profile=True)["profile"]


def _memory(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: answer.get(name) for name in ("peak_bytes", "compile_s")}


def run_sides(
    sides: Sequence[GpuSide], plan: Plan, results: dict[str, Any], console: Console
) -> None:
    """Runs sides in their order; a side that no longer fits into the budget is skipped.

    A side that fails, or takes longer than its limit, keeps the figures that it told, and the
    others go on.
    """
    begun_s = time.monotonic()
    waiting = list(sides)
    ahead: _Process | None = None
    try:
        while waiting:
            one = waiting.pop(0)
            remaining_s = plan.budget_s - (time.monotonic() - begun_s)
            needed_s = min(one.estimate_s, plan.side_limit_s) * (0.1 if plan.tiny else 1)
            row = {"key": one.key, "workload": one.workload, "name": one.side.name}
            row["is_ours"] = one.is_ours
            process, ahead = (ahead if ahead and ahead.one is one else None), None
            if process is None and remaining_s < needed_s:
                row["status"] = f"skipped: {remaining_s:.0f} s left, needs about {needed_s:.0f} s"
            else:
                process = process or _Process(one, plan)
                if plan.gated and waiting:
                    both_gb = one.device_gb + waiting[0].prepared_gb
                    ahead = _Process(waiting[0], plan) if both_gb <= plan.device_gb else None
                try:
                    process.measure(row, min(plan.side_limit_s, max(needed_s, remaining_s)))
                    row["status"] = "done"
                except WorkerError as error:
                    row |= {"status": "failed", "error": str(error)}
                finally:
                    process.fleet.__exit__()
            results["sides"].append(row)
            write_json(plan.output / "results.json", results)
            told = {name: value for name, value in row.items() if name not in _LONG}
            console.print(f"{one.key}: {told}", markup=False)
    finally:
        if ahead:
            ahead.fleet.__exit__()


def rows_of(results: dict[str, Any]) -> list[Row]:
    """Returns ratios: those that are wanted, and the first side of ours beside all others."""
    is_tiny = results["plan"]["tiny"]
    measured = [one for one in results["sides"] if one.get("steps_per_s")]
    by_key = {one["key"]: one for one in measured}
    ours = [one for one in measured if one["is_ours"]]
    firsts = {one["workload"]: one["key"] for one in reversed(ours)}
    pairs: dict[tuple[str, str], float | None] = {
        pair: bound for pair, bound in WANTED.items() if set(pair) <= set(by_key)
    }
    for one in measured:
        first = firsts.get(one["workload"], one["key"])
        if first != one["key"] and one["key"] not in {other for _, other in pairs}:
            pairs[first, one["key"]] = None
    rows: list[Row] = []
    for (key, other), bound in pairs.items():
        mine, theirs = by_key[key], by_key[other]
        speeds = [
            [_workload(one, is_tiny).units_per_step * speed for speed in one["steps_per_s"]]
            for one in (mine, theirs)
        ]
        workload = _workload(mine, is_tiny)
        case = f"{workload.title}: {mine['name']}"
        row = make_row(case, *speeds, theirs["name"], f"{workload.unit}/s")
        row["details"] = {
            name: [figures.get(name) for figures in (_details(mine), _details(theirs))]
            for name in _details(mine)
        }
        row |= {"has_peer": not theirs["is_ours"]} | ({"wanted": bound} if bound else {})
        rows.append(row)
    return rows


def _workload(row: dict[str, Any], is_tiny: bool) -> Any:
    name = "llama1b_8k" if "8192" in row["key"] else row["workload"]
    return tiny(GPU_WORKLOADS[name]) if is_tiny else GPU_WORKLOADS[name]


def _details(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the share of the device's peak, memory, seconds and losses, as far as known."""
    found = {"first epoch, s": row["first_epoch_s"], "first loss": row["first_loss"]}
    peak = next((p for name, p in _PEAK_FLOPS.items() if name in (row["device_kind"] or "")), None)
    flops = _workload(row, is_tiny=False).flops_per_step(row["num_parameters"])
    if peak and flops:
        found["MFU"] = statistics.median(row["steps_per_s"]) * flops / peak
    if row.get("peak_bytes"):
        found["peak, GB"] = row["peak_bytes"] / 1e9
    return found


@click.command()
@click.option("--output", type=click.Path(path_type=Path), required=True, help="Folder.")
@click.option("--only", default="", help="Workloads or beginnings of keys of sides.")
@click.option("--budget-s", default=300.0, show_default=True, help="Seconds of all sides.")
@click.option(
    "--cache", type=click.Path(path_type=Path), help="Programs; OUTPUT/cache if not given."
)
@click.option("--tiny", is_flag=True, help="Small sizes, on the CPU.")
@click.option("--rounds", default=3, show_default=True, help="0 for the first step only.")
@click.option("--round-s", default=2.0, show_default=True, help="Seconds of a round.")
@click.option("--resume", is_flag=True, help="Measures only what OUTPUT lacks.")
@click.option("--profile", is_flag=True, help="Of sides on JAX, after the rounds.")
@click.option("--gated", is_flag=True, help="One trains while the next prepares.")
@click.option("--device-gb", default=72.0, show_default=True, help="Memory for both, with --gated.")
@click.option("--side-limit-s", default=150.0, show_default=True, help="Seconds of a side.")
def main(output: Path, only: str, cache: Path | None, *, resume: bool, **options: Any) -> None:
    """Runs sides, and writes results, table and picture."""
    plan = Plan(output=output, cache=cache or output / "cache", **options)
    console = Console(width=200, record=True)
    output.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"plan": options, "num_cores": os.cpu_count(), "sides": []}
    path = output / "results.json"
    if resume and path.is_file():
        sides = json.loads(path.read_text(encoding="utf-8"))["sides"]
        results["sides"] = [one for one in sides if one["status"] == "done"]
    done = {one["key"] for one in results["sides"]}
    sides = select([name for name in only.split(",") if name])
    wanted = [one for one in sides if one.key not in done]
    with contextlib.suppress(KeyboardInterrupt):
        run_sides(wanted, plan, results, console)
    if rows := rows_of(results):
        console.print(make_table("gpu", rows))
        kinds = {one["device_kind"] for one in results["sides"] if one.get("device_kind")}
        draw(output / "speeds.png", rows, ", ".join(sorted(kinds)))
    (output / "tables.txt").write_text(console.export_text(), encoding="utf-8")


if __name__ == "__main__":
    main()
