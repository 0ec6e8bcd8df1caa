"""The quantities that grow, their sizes, and what is measured of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ["AXES", "Axis", "Cost"]


@dataclasses.dataclass(frozen=True)
class Cost:
    """Something that takes time.

    Args:
        title: in table and plot.
        clock: "elapsed" or "CPU": the time that is meant. CPU time is that of one process.
    """

    title: str
    clock: str = "CPU"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """A quantity that grows while all others stay.

    Args:
        name: in table and plot.
        module: in `benchmarks.growth.costs`; its `measure` answers a question about one size.
        costs: what its answers tell, by key.
        sizes: in ascending order.
        long_sizes: further sizes that take minutes, for a benchmark of this axis only.
        smallest_sizes: to see that it runs.
        argument: name of the size in a question.
        others: the rest of the question.
    """

    name: str
    module: str
    costs: Mapping[str, Cost]
    sizes: tuple[int, ...]
    smallest_sizes: tuple[int, ...]
    long_sizes: tuple[int, ...] = ()
    argument: str = "size"
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def question(self, size: int, *, is_smallest: bool) -> dict[str, Any]:
        """Returns the question about one size."""
        return {self.argument: size, **self.others, "is_smallest": is_smallest}


_STEPS = {
    "trace_s": Cost("trace of the first call", "elapsed"),
    "compile_s": Cost("compilation", "elapsed"),
    "call_s": Cost("later call", "elapsed"),
}

AXES = (
    Axis(
        name="variables",
        module="steps",
        costs=_STEPS,
        sizes=(10, 100, 1000, 2500, 5000),
        smallest_sizes=(10, 20),
        argument="num_variables",
        others={"num_replicas": 1},
    ),
    Axis(
        name="replicas",
        module="steps",
        costs=_STEPS,
        sizes=(1, 2, 4, 8, 16, 32, 64),
        smallest_sizes=(1, 2),
        argument="num_replicas",
        others={"num_variables": 10},
    ),
    Axis(
        name="workers",
        module="workers",
        costs={
            "join_s": Cost("join", "elapsed"),
            "barrier_s": Cost("barrier", "elapsed"),
            "agreement_s": Cost("agreement on the step to save", "elapsed"),
            "verdict_s": Cost("verdict on a killed process", "elapsed"),
        },
        sizes=(2, 4, 8, 16, 32, 64),
        smallest_sizes=(2, 3),
    ),
    Axis(
        name="simulated workers",
        module="simulated_workers",
        costs={
            "join_s": Cost("join"),
            "judge_s": Cost("check of all, each 0.25 s"),
            "barrier_s": Cost("barrier"),
            "agreement_s": Cost("agreement on the step to save"),
            "verdict_s": Cost("verdict on a lost process"),
        },
        sizes=(10, 100, 1000, 3000, 10_000),
        smallest_sizes=(10, 20),
    ),
    Axis(
        name="closures",
        module="closures",
        costs={
            "coordinator_s": Cost("scheduled and joined: coordinator"),
            "queue_s": Cost("queue alone, one worker"),
            "backlog_s": Cost("queue alone, all waiting"),
        },
        sizes=(1000, 10_000, 30_000),
        long_sizes=(100_000, 1_000_000),
        smallest_sizes=(10, 20),
    ),
    Axis(
        name="coordinated workers",
        module="coordinated_workers",
        costs={
            "coordinator_s": Cost("20,000 closures: coordinator"),
            "all_s": Cost("20,000 closures: scheduled and joined", "elapsed"),
        },
        sizes=(2, 20, 200),
        smallest_sizes=(2, 4),
    ),
    Axis(
        name="rows",
        module="rows",
        costs={
            "create_s": Cost("creation"),
            "first_journal_s": Cost("first journal"),
            "pull_s": Cost("pull of 1,000 rows"),
            "push_s": Cost("push of 1,000 rows"),
            "journal_s": Cost("push and journal entry"),
        },
        sizes=(10_000, 100_000, 1_000_000, 10_000_000, 100_000_000),
        smallest_sizes=(2000, 4000),
    ),
    Axis(
        name="keys",
        module="keys",
        costs={
            "pull_s": Cost("pull of 10,000 keys"),
            "push_s": Cost("push of 10,000 known keys"),
            "new_s": Cost("push of 10,000 new keys"),
            "journal_s": Cost("push of 1,000 keys and journal entry"),
        },
        sizes=(10_000, 100_000, 1_000_000, 10_000_000),
        long_sizes=(100_000_000,),
        smallest_sizes=(2000, 4000),
    ),
    Axis(
        name="shards",
        module="shards",
        costs={
            "shard_s": Cost("part of one process"),
            "step_s": Cost("step"),
            "resume_s": Cost("resume after 500 steps"),
        },
        sizes=(1000, 10_000, 100_000, 1_000_000),
        smallest_sizes=(64, 128),
    ),
    Axis(
        name="checkpoint arrays",
        module="checkpoints",
        costs={
            "save_s": Cost("save", "elapsed"),
            "restore_s": Cost("restore", "elapsed"),
            "save_cpu_s": Cost("save"),
            "restore_cpu_s": Cost("restore"),
        },
        sizes=(10, 100, 1000, 3000, 10_000),
        smallest_sizes=(2, 4),
    ),
    Axis(
        name="events",
        module="events",
        costs={
            "write_s": Cost("written by four workers"),
            "read_s": Cost("read"),
            "report_s": Cost("breakdown and series of a report"),
            "watch_s": Cost("state for a live view"),
        },
        sizes=(10_000, 100_000, 1_000_000),
        long_sizes=(10_000_000,),
        smallest_sizes=(1000, 2000),
    ),
)
