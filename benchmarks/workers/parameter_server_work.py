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
    "EMBEDDING_SIZE",
    "LEARNING_RATE",
    "NUM_BATCHES",
    "SLEEP_S",
    "TABLE_ROWS",
    "ClusterOptions",
    "Work",
    "answer_work",
    "id_batches",
    "require_equal",
]

Array = np.ndarray[Any, Any]

# Float32 holds each number of a row exactly: each row of the table begins as its own number.
TABLE_ROWS, EMBEDDING_SIZE = 10**7, 16
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
    """

    num_workers: int = 2
    num_servers: int = 2
    optimizer: str = "sgd"


def id_batches(num_ids: int) -> Array:
    """Returns ids by chance of `TABLE_ROWS`, of shape (NUM_BATCHES, num_ids)."""
    return np.random.default_rng(num_ids).integers(TABLE_ROWS, size=(NUM_BATCHES, num_ids))


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
