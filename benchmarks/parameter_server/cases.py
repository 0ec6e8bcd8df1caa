"""What is measured, on which clusters, and by whom."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.cases import Side, whole_side
from benchmarks.workers.parameter_server_work import ClusterOptions

__all__ = ["CASES", "OURS", "PEER", "SCALING", "Case", "by_cluster"]


@dataclasses.dataclass(frozen=True)
class Case:
    """One kind of work.

    Args:
        name: in tables.
        kind: of work, as workers know it.
        unit: of what is counted in a second.
        cluster: that it runs on.
        num_ids: of rows in each call; 0 for other work.
        speed: what ours tells as the speed; None measures by elapsed time, beside the peer.
        is_main: whether it is measured when all benchmarks run, too.
    """

    name: str
    kind: str
    unit: str
    cluster: ClusterOptions
    num_ids: int = 0
    speed: str | None = None
    is_main: bool = True

    @property
    def count(self) -> int:
        """How many of the unit one call is."""
        return self.num_ids or 1

    def question(self, amount: int) -> dict[str, Any]:
        """Returns what a worker is asked for so many calls."""
        return {"kind": self.kind, "num_ids": self.num_ids, "amount": amount}

    def speed_of(self, amount: int, told: Mapping[str, float]) -> float:
        """Returns how much a second, from the answer to `question`."""
        return told[self.speed] if self.speed else amount * self.count / told["seconds"]


OURS = {
    "mlp": whole_side("Stratagem", "stratagem_parameter_server"),
    "closures": whole_side("Stratagem", "stratagem_parameter_server"),
    "sleeps": whole_side("Stratagem", "stratagem_parameter_server"),
    "pull_rows": whole_side("Stratagem", "stratagem_rows"),
    "push_rows": whole_side("Stratagem", "stratagem_rows"),
}
PEER: Side = dataclasses.replace(
    whole_side("TensorFlow", "tensorflow_parameter_server", environment="peers"),
    variables={"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"},
)

_TWO = ClusterOptions(num_workers=2, num_servers=2)
_NUM_IDS = (1_000, 10_000, 100_000)


def _rows(kind: str, title: str, optimizer: str = "sgd") -> list[Case]:
    cluster = ClusterOptions(num_workers=1, num_servers=2, optimizer=optimizer)
    return [
        Case(f"{title} {count:,} rows", kind, "rows/s", cluster, count, is_main=False)
        for count in _NUM_IDS
    ]


def _popular_rows(row_size: int) -> list[Case]:
    """Returns cases with ids by Zipf's law of 1 M rows, and those of one core of a server."""
    cluster = ClusterOptions(1, 2, table_rows=10**6, row_size=row_size, is_zipf=True)
    table = f"1 M x {row_size}, Zipf"
    elapsed, per_core = ("rows/s", None), ("distinct rows/CPU s", "rows_per_server_s")
    return [  # pushes last: they change the rows
        Case(
            f"{table}: {done}, {count:,} ids",
            kind,
            unit,
            cluster,
            count,
            speed,
            is_main=row_size > 16,
        )
        for kind, verb in (("pull_rows", "pulled"), ("push_rows", "pushed"))
        for done, (unit, speed) in ((verb, elapsed), (f"{verb} a server core", per_core))
        for count in _NUM_IDS
    ]


def _sleeps(num_workers: int) -> Case:
    workers = "1 worker" if num_workers == 1 else f"{num_workers} workers"
    cluster = ClusterOptions(num_workers=num_workers, num_servers=1)
    return Case(f"closures that sleep, {workers}", "sleeps", "closures/s", cluster)


SCALING = (_sleeps(1), _sleeps(4))
CASES = (
    Case("MLP, a step a closure", "mlp", "steps/s", _TWO),
    Case("empty closures", "closures", "closures/s", _TWO),
    *SCALING,
    *_rows("pull_rows", "pull"),
    *_rows("push_rows", "push, SGD,"),
    *_rows("push_rows", "push, Adagrad,", "adagrad"),
    *_popular_rows(16),
    *_popular_rows(64),
)


def by_cluster(cases: Sequence[Case]) -> list[list[Case]]:
    """Returns the cases of each cluster together, so that it is started once."""
    return [list(group) for _, group in itertools.groupby(cases, lambda case: case.cluster)]
