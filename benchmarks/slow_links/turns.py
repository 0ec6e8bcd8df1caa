"""Time of a step on 100 Mbit/s, of methods in turns: `python -m benchmarks.slow_links.turns`.

All workers are started first, and a method trains while the others wait. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.cases import Environments
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.slow_links.links import LINKS, two_hosts
from benchmarks.slow_links.methods import TRIALS, Method
from benchmarks.slow_links.training import Ask, Trainer

__all__ = ["IN_TURNS", "Turn", "medians"]

_STREAMING = "StreamingDiLoCo"
IN_TURNS = (
    Method("DiLoCo, H=50", "DiLoCo", 50),
    Method("Streaming DiLoCo, H=50, no overlap", _STREAMING, 50, overlap=0),
    Method("Streaming DiLoCo, H=50, overlap 15", _STREAMING, 50, overlap=15),
    Method("DiLoCo, H=30", "DiLoCo", 30),
    Method("Streaming DiLoCo, H=30, no overlap", _STREAMING, 30, overlap=0),
    Method("Streaming DiLoCo, H=30, overlap 9", _STREAMING, 30, overlap=9),
)
_LINK = LINKS[2]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """Some steps of a method.

    Args:
        method: its name.
        step_s: seconds of a step.
        step_cpu_s: CPU seconds of a worker in a step.
        step_bytes: bytes that a worker sends in a step.
    """

    method: str
    step_s: float
    step_cpu_s: float
    step_bytes: float


def medians(turns: Sequence[Turn]) -> list[Turn]:
    """Returns the median of the turns of each method, in the order of their first turns."""
    by_method: dict[str, list[Turn]] = {}
    for turn in turns:
        by_method.setdefault(turn.method, []).append(turn)
    return [
        Turn(
            method=name,
            step_s=statistics.median(one.step_s for one in own),
            step_cpu_s=statistics.median(one.step_cpu_s for one in own),
            step_bytes=statistics.median(one.step_bytes for one in own),
        )
        for name, own in by_method.items()
    ]


def _measure(methods: Sequence[Method], num_rounds: int, console: Console) -> list[Turn]:
    turns: list[Turn] = []
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(two_hosts())
        caches = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        asks: dict[str, Ask] = {}
        for cluster, method in enumerate(methods):
            trainer = Trainer(
                Environments(),
                hosts,
                "in turns",
                TRIALS["transformer"],
                method,
                caches,
                cluster=cluster,
            )
            asks[method.name] = stack.enter_context(trainer.workers(_LINK))
            # All programs have run then, and a turn ends when what was sent has come.
            asks[method.name](2 * method.period - 1)
        for _ in range(num_rounds):
            for method in methods:
                num_steps = 2 * method.period
                told = asks[method.name](num_steps)
                turn = Turn(
                    method=method.name,
                    step_s=told["seconds"] / num_steps,
                    step_cpu_s=told["cpu_s"] / num_steps,
                    step_bytes=told["num_bytes"] / num_steps,
                )
                console.print(f"{turn.method}: {turn.step_s:.4f} s, CPU {turn.step_cpu_s:.4f} s")
                turns.append(turn)
    return turns


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="file of the figures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="methods whose name contains this")
    options = parser.parse_args()
    console = Console()
    methods = [one for one in IN_TURNS if options.only in one.name]
    turns = _measure(methods, options.rounds, console)
    table = Table("method", "s per step", "CPU s", "MB per step", title=_LINK.name)
    for one in medians(turns):
        numbers = (f"{one.step_s:.3f}", f"{one.step_cpu_s:.3f}", f"{one.step_bytes / 1e6:.2f}")
        table.add_row(one.method, *numbers)
    console.print(table)
    told = {
        "benchmark": "slow_links, in turns",
        "machine": describe_machine(None),
        "turns": [dataclasses.asdict(one) for one in turns],
    }
    write_json(options.output, told)


if __name__ == "__main__":
    _main()
