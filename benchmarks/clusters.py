"""Processes that work together on this machine: sums, servers and their tables, input workers.

`allreduce`         sums between processes by each algorithm; AUTO's choice beside PyTorch's Gloo.
`parameter_server`  closures and rows of tables on clusters beside TensorFlow's.
`recommenders`      a table beside TorchRec's and TensorFlow's: speed, processor time, and memory.
`input_service`     a device that waits for input, fed by workers of ours or of tf.data service; the
                    figure is the share of time in which it is busy, with simulated steps.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from benchmarks.sides import QUIET_TENSORFLOW, Answers, Case, Side, Task, worker_side
from benchmarks.workers.protocol import cluster_variables, rank_variables

# One such sum takes longer than what disturbs it.
_LARGE_BYTES = 2**24
_SIZES_BYTES = tuple(2**power for power in (12, 14, 16, 18, 20, 22, 24, 26, 28))
_BRIEF_SIZES_BYTES = tuple(2**power for power in (12, 18, 24, 26))
# A larger sum takes seconds, and its speed is the memory's.
_MOST_COMPARED_BYTES = 2**24


def allreduce_cases(*, is_brief: bool = False, is_compared: bool = False) -> list[Case]:
    """Returns a case for each cluster, with a task for each size of the array of a replica."""
    sizes = _BRIEF_SIZES_BYTES if is_brief else _SIZES_BYTES
    if is_compared:  # two revisions
        sizes = tuple(size for size in sizes if size <= _MOST_COMPARED_BYTES)
    clusters = ((2, 1), (4, 1)) if is_brief else ((2, 1), (4, 1), (2, 2))
    return [_sum_case(*one, tuple(map(_sum_task, sizes))) for one in clusters]


def _sum_case(num_processes: int, num_devices: int, tasks: tuple[Task, ...]) -> Case:
    """Returns a case of processes that have so many devices each."""

    def spread() -> list[dict[str, str]]:
        own = {"JAX_NUM_CPU_DEVICES": str(num_devices)}
        return [{**one, **own} for one in cluster_variables(num_processes)]

    def ours(name: str, **options: str) -> Side:
        return dataclasses.replace(
            worker_side(name, "stratagem_allreduce", **options), spread=spread
        )

    name, peer = (
        f"{num_processes} processes",
        ours("the compiler's algorithm", algorithm="compiler"),
    )
    if num_devices > 1:
        name += f" x {num_devices} devices"
    else:  # as PyTorch has
        peer = worker_side("PyTorch Gloo", "torch_allreduce", "peers", {"OMP_NUM_THREADS": "1"})
        ranks = functools.partial(rank_variables, num_processes)
        peer = dataclasses.replace(peer, spread=ranks)
    return Case(name=name, ours=ours("AUTO"), references=(peer,), tasks=tasks)


def _sum_task(size_bytes: int) -> Task:
    num_rounds = 1 if size_bytes > _LARGE_BYTES else 3
    return Task(
        name=f"{size_bytes >> 20} MiB" if size_bytes >= 2**20 else f"{size_bytes >> 10} KiB",
        question=lambda amount: {"bytes": size_bytes, "rounds": num_rounds},
        figures={"": lambda amount, answers: 1 / max(map(_seconds, answers))},
        unit="sums/s",
        is_timed=False,
        details=_sum_details,
    )


def _seconds(answer: Mapping[str, Any]) -> float:
    """Returns the seconds of a sum: of ours by what AUTO takes, among all algorithms."""
    return answer["seconds"][answer["chosen"]]


def _sum_details(answers: Answers) -> dict[str, Any]:
    """Returns AUTO's choice, by how much another one is faster, and all in milliseconds."""
    times_s, chosen = answers[0]["seconds"], answers[0]["chosen"]
    loss = times_s[chosen] / min(times_s.values()) - 1
    milliseconds = {f"{name}, ms": 1e3 * time_s for name, time_s in times_s.items()}
    return {"chosen": chosen, "loss of the choice": loss, **milliseconds}


_NUM_IDS = (1_000, 10_000, 100_000)
_CHECKED_IDS = 1_000


def _tensorflow(module: str, **options: Any) -> Side:
    return worker_side("TensorFlow", module, "peers", QUIET_TENSORFLOW, **options)


def parameter_server_cases() -> list[Case]:
    """Returns a case for each cluster; pushes come last, because they change the rows."""
    return [
        _closures(num_workers=2, num_servers=2),
        _rows_case("10 M x 16", is_main=False),
        _rows_case("1 M x 16, Zipf", is_main=False, table_rows=10**6, is_zipf=True),
        _rows_case("1 M x 64, Zipf", row_size=64, table_rows=10**6, is_zipf=True),
    ]


def _closures(**options: Any) -> Case:
    def task(kind: str, title: str, unit: str) -> Task:
        return Task(
            name=title,
            # A question without ids, as older revisions expect it.
            question=lambda amount: {"kind": kind, "num_ids": 0, "amount": amount},
            figures={"": lambda amount, answers: amount / answers[0]["seconds"]},
            unit=unit,
            least=8,
            is_even=False,
        )

    return Case(
        name="2 workers",
        ours=worker_side("Stratagem", "stratagem_parameter_server", **options),
        references=(_tensorflow("tensorflow_parameter_server", **options),),
        tasks=(
            task("mlp", "MLP, a step a closure", "steps/s"),
            task("closures", "empty closures", "closures/s"),
        ),
    )


def _rows_case(name: str, *, is_main: bool = True, **options: Any) -> Case:
    options = {"num_workers": 1, "num_servers": 2, **options}
    return Case(
        name=name,
        ours=worker_side("Stratagem", "stratagem_rows", **options),
        references=(_tensorflow("tensorflow_rows", **options),),
        tasks=tuple(_rows_task(kind, count) for kind in ("pull", "push") for count in _NUM_IDS),
        is_main=is_main,
    )


def _rows_task(kind: str, num_ids: int) -> Task:
    return Task(
        name=f"{kind}, {num_ids:,} ids",
        question=lambda amount: {"kind": f"{kind}_rows", "num_ids": num_ids, "amount": amount},
        figures={"": lambda amount, answers: amount * num_ids / answers[0]["seconds"]},
        unit="rows/s",
        least=4,
        is_even=False,
        details=_row_details,
    )


def _row_details(answers: Answers) -> dict[str, Any]:
    """Returns what all processes tell of their costs; an older revision tells less."""
    titles = {
        "cpu_us_per_id": "CPU us/id",
        "server_rows_per_s": "distinct rows/CPU s of a server",
        "row_bytes": "bytes/row",
    }
    return {
        title: sum(one[key] for one in answers)
        for key, title in titles.items()
        if key in answers[0]
    }


def recommenders_cases(*, is_smallest: bool = False) -> list[Case]:
    """Returns ours beside a peer, with the same table; both are started together.

    TorchRec and TensorFlow have no keys: their tables have rows by number.
    """
    table_rows = 20_000 if is_smallest else 10**6
    rows = _table_case("1 M x 64 rows", table_rows, num_servers=2)
    alone = _table_case("1 M x 64 rows, one process", table_rows, num_servers=1)
    return [_table_case("1 M x 64 keys", table_rows, num_servers=2, is_keyed=True), rows, alone]


def _table_case(name: str, table_rows: int, **options: Any) -> Case:
    options |= {"table_rows": table_rows, "row_size": 64, "is_zipf": True}
    if "is_keyed" in options:
        peer = _tensorflow("tensorflow_rows", **options)
    else:
        peer = worker_side("TorchRec", "torchrec_tables", "peers", {}, **options)
        ranks = functools.partial(rank_variables, options["num_servers"])
        peer = dataclasses.replace(peer, spread=ranks)
    kinds = {"pull": "pull", "step": "pull and push"}
    return Case(
        name=name,
        ours=worker_side("Stratagem", "stratagem_rows", **options),
        references=(peer,),
        tasks=tuple(
            dataclasses.replace(_rows_task(kind, count), name=f"{title}, {count:,} ids")
            for kind, title in kinds.items()
            for count in _NUM_IDS
        ),
        prepared={"kind": "check", "num_ids": _CHECKED_IDS},
    )


_VARIABLES = {**QUIET_TENSORFLOW, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
_ROUND_S, _SMALLEST_S = 6.0, 1.0

# What a batch is made from, seconds of a step of the device, and numbers of workers; 0 is the loop
# of the trainer. Batches take 165 and 32 ms on the machine of the figures. Two cores cannot decode
# more than two at a time; workers that wait need no core.
_WORK = {
    "objects": ("Objects: 160 ms away", 0.02, (0, 1, 2, 4, 8)),
    "jpeg": ("JPEG: decode, resize", 0.01, (0, 1, 2, 4)),
}


def input_service_cases(*, is_smallest: bool = False) -> list[Case]:
    """Returns a case for each work and number of workers; each round starts its processes anew."""
    seconds = _SMALLEST_S if is_smallest else _ROUND_S
    task = Task(
        question=lambda amount: {"seconds": seconds},
        figures={"": lambda amount, answers: answers[0]["busy"]},
        unit="busy",
    )
    return [
        _input_case(work, title, step_s, num_workers, task)
        for work, (title, step_s, numbers) in _WORK.items()
        for num_workers in (numbers[1:2] if is_smallest else numbers)
    ]


def _input_case(work: str, title: str, step_s: float, num_workers: int, task: Task) -> Case:
    def side(name: str, kind: str) -> Side:
        options = {"kind": kind, "work": work, "step_s": step_s, "num_workers": num_workers}
        # Both in the environment of TensorFlow: the same interpreter and libraries.
        return worker_side(name, "input_service", "peers", _VARIABLES, **options)

    return Case(
        name=f"{title}, {num_workers} workers",
        ours=side("Stratagem", "ours"),
        references=(side("tf.data service", "tensorflow"),),
        tasks=(task,),
        is_fresh=True,
    )
