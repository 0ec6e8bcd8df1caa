"""What each side of `benchmarks/parameter_server` is asked to do, and with which numbers.

Only NumPy is imported here: the environment of the peers has no Stratagem.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

__all__ = [
    "LEARNING_RATE",
    "NUM_BATCHES",
    "SLEEP_S",
    "ClusterOptions",
    "Work",
    "answer_work",
    "id_batches",
    "require_equal",
]

Array = np.ndarray[Any, Any]

# Different ids each time, so that the rows do not lie in a cache already.
NUM_BATCHES = 64
LEARNING_RATE = 0.5
# A step that stands in for computing.
SLEEP_S = 0.02

# Does so much of a question, and returns numbers of its own that are told with the time.
Work = Callable[[dict[str, Any]], dict[str, float]]


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """The cluster that a side is to start.

    Args:
        num_workers: that run closures, or of which one does all.
        num_servers: that hold variables.
        optimizer: of rows: "sgd" or "adagrad".
        table_rows: of the table. Float32 holds their numbers exactly: each row begins as its own.
        row_size: of float32 in a row.
        is_zipf: ids by Zipf's law, with the exponent 1; otherwise all are equally likely.
    """

    num_workers: int = 2
    num_servers: int = 2
    optimizer: str = "sgd"
    table_rows: int = 10**7
    row_size: int = 16
    is_zipf: bool = False


def id_batches(num_ids: int, options: ClusterOptions) -> Array:
    """Returns ids by chance of the table's rows, of shape (NUM_BATCHES, num_ids)."""
    rng, num_rows = np.random.default_rng(num_ids), options.table_rows
    if not options.is_zipf:
        return rng.integers(num_rows, size=(NUM_BATCHES, num_ids))
    sums = np.cumsum(1 / np.arange(1, num_rows + 1))
    ranks = np.searchsorted(sums, sums[-1] * rng.random((NUM_BATCHES, num_ids)))
    return rng.permutation(num_rows)[ranks]  # popular rows are on all servers


def answer_work(kinds: Mapping[str, Work]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers a question for work.

    Args:
        kinds: what does each kind of work.

    Returns:
        Answers `{"kind": ..., "amount": ..., ...}` with the `seconds` it took, and what the work
        itself tells.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        work = kinds[question["kind"]]
        begun_s = time.perf_counter()
        told = work(question)
        return {**told, "seconds": time.perf_counter() - begun_s}

    return answer


def require_equal(what: str, got: Array, wanted: Array) -> None:
    """Refuses figures of a side that computes something else.

    Args:
        what: they are.
        got: numbers.
        wanted: those that are right.

    Raises:
        RuntimeError: they differ.
    """
    if not np.allclose(got, wanted, rtol=1e-6):
        raise RuntimeError(f"{what}: {got} came, and {wanted} is right")
