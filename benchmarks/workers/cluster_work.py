"""What sides are asked to do on clusters of servers, and the processes that they start for it.

Only NumPy is imported here: the environments of the peers have no Stratagem.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.workers.protocol import arguments, serve_questions

Array = np.ndarray[Any, Any]

# Different ids each time, so that the rows do not lie in a cache already.
NUM_BATCHES = 64
LEARNING_RATE = 0.5
# Rows begin as their number modulo this, which float32 holds exactly after many updates.
_MODULUS = 1000


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """The cluster that a side is to start, and the table that it makes there."""

    num_workers: int = 2  # that run closures, or of which one does all
    num_servers: int = 2  # that hold variables, or processes that rows are split over
    table_rows: int = 10**7  # of the table
    row_size: int = 16  # of float32 in a row
    # ids by Zipf's law, with the exponent 1; otherwise all are equally likely.
    is_zipf: bool = False
    # rows are found by 64-bit keys, and all are made before anything is measured.
    is_keyed: bool = False


def id_batches(num_ids: int, options: ClusterOptions) -> Array:
    """Returns ids by chance of the table's rows, of shape (NUM_BATCHES, num_ids)."""
    rng, num_rows = np.random.default_rng(num_ids), options.table_rows
    if not options.is_zipf:
        return rng.integers(num_rows, size=(NUM_BATCHES, num_ids))
    sums = np.cumsum(1 / np.arange(1, num_rows + 1))
    ranks = np.searchsorted(sums, sums[-1] * rng.random((NUM_BATCHES, num_ids)))
    return rng.permutation(num_rows)[ranks]  # popular rows are on all servers


def keys_of(ids: Array) -> Array:
    """Returns a 64-bit key for each id: distinct, and without an order (splitmix64)."""
    bits = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (bits ^ (bits >> np.uint64(31))).view(np.int64)


def first_rows(first: int, count: int, row_size: int) -> Array:
    """Returns rows of the table as it begins."""
    numbers = (np.arange(first, first + count) % _MODULUS).astype(np.float32)
    return np.repeat(numbers[:, None], row_size, axis=1)


def serve_rows(make: Callable[[ClusterOptions], Any]) -> None:
    """Answers how long work on a side's table takes, and what it costs.

    `{"kind": "pull_rows", "push_rows" or "step_rows", "num_ids": ..., "amount": ...}` does so many
    calls of `pull`, `push`, or both in `step`, which return the last rows, or those of them that
    this process asks for. "check" tries that rows are right before and after an update, in a new
    table, and answers `row_bytes`, the memory of the processes that hold it, for each row.
    """
    options = ClusterOptions(**arguments())
    distinct_of = functools.cache(
        lambda num_ids: [len(np.unique(ids)) for ids in id_batches(num_ids, options)]
    )

    def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
        rows = make(options)

        def answer(question: dict[str, Any]) -> dict[str, Any]:
            num_ids = question["num_ids"]
            if question["kind"] == "check":
                _check(rows, num_ids, options)
                return {"row_bytes": rows.row_bytes}
            amount = question["amount"]
            call = getattr(rows, question["kind"].removesuffix("_rows"))
            counts = distinct_of(num_ids)
            num_rows = sum(counts[number % NUM_BATCHES] for number in range(amount))
            begun_s, server_s, own_s = time.perf_counter(), server_cpu_s(), time.process_time()
            call(num_ids, amount)
            seconds = time.perf_counter() - begun_s
            own_s, server_s = time.process_time() - own_s, server_cpu_s() - server_s
            told = {"cpu_us_per_id": 1e6 * (own_s + server_s) / (amount * num_ids)}
            if _started:
                told["server_rows_per_s"] = num_rows / max(server_s, 1e-9)
            return {"seconds": seconds, **told}

        return answer

    serve_questions(prepare)


def _check(rows: Any, num_ids: int, options: ClusterOptions) -> None:
    """Refuses figures of a side that computes something else."""
    ids, rank = id_batches(num_ids, options)[0], int(os.environ.get("RANK", "0"))
    before, at_update, after = rows.pull(num_ids, 1), rows.step(num_ids, 1), rows.pull(num_ids, 1)
    # One of several processes gets the rows of its part.
    own = slice(rank * len(before), (rank + 1) * len(before))
    _, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    wanted = (ids[own] % _MODULUS)[:, None] * np.ones(options.row_size)
    moved = LEARNING_RATE * counts[place][own, None]
    for got, expected in ((before, wanted), (at_update, wanted), (after, wanted - moved)):
        if not np.allclose(got, expected, rtol=1e-5, atol=1e-4):
            worst = np.abs(got - expected).max()
            raise RuntimeError(f"rows differ from what is right by up to {worst:g}")


# A pipe is closed when nobody holds it any more: servers end with this process, however that ends.
_started: list[subprocess.Popen[str]] = []


def start_server(module: str, *words: str) -> subprocess.Popen[str]:
    """Starts a program in `benchmarks.workers` that ends when its stdin does."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.workers.{module}", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    _started.append(process)
    return process


def server_ids() -> list[int]:
    return [process.pid for process in _started]


def server_cpu_s() -> float:
    """Returns the processor time of all processes that were started here, in seconds."""
    stats = [Path(f"/proc/{process.pid}/stat").read_text("ascii") for process in _started]
    # After the name in parentheses, times of user and system are fields 12 and 13.
    ticks = [sum(map(int, stat.rpartition(")")[2].split()[11:13])) for stat in stats]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


def resident_bytes(processes: Sequence[int]) -> int:
    """Returns the resident memory of processes by their ids; 0 stands for this one."""
    total = 0
    for process in processes:
        status = Path(f"/proc/{process or 'self'}/status").read_text("utf-8")
        total += int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return total
