"""What each side of `benchmarks/recommenders` is asked to do with its table.

Only NumPy is imported here: the environments of the peers have no Stratagem.
"""

from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import socket
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
    "LEARNING_RATE",
    "NUM_BATCHES",
    "Table",
    "TableOptions",
    "answer_tables",
    "first_rows",
    "id_batches",
    "keys_of",
    "loopback_bytes",
    "own_loopback",
    "resident_bytes",
]

Array = np.ndarray[Any, Any]

# Different ids each time, so that the rows do not lie in a cache already.
NUM_BATCHES = 16
LEARNING_RATE = 0.5
# Rows begin as their number modulo this, which float32 holds exactly after many updates.
_MODULUS = 1000
_GOLDEN = 2_654_435_761
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """The table that a side is to make.

    Args:
        num_rows: of the table.
        row_size: of float32 in a row.
        num_holders: processes that the rows are split over.
        is_keyed: rows are found by 64-bit keys, and all are made before anything is measured.
    """

    num_rows: int
    row_size: int = 64
    num_holders: int = 2
    is_keyed: bool = False


@dataclasses.dataclass
class Table:
    """A side's table.

    Args:
        pull: looks up the rows of a batch, by number of ids and of the batch; it returns them, or
            those that one of several processes asked for.
        step: the same, and updates them by gradients of ones.
        cpu_s: processor time of all processes of the side.
        sent_bytes: bytes that left a process until now.
        row_bytes: memory of the processes that hold the table, for each row.
    """

    pull: Callable[[int, int], Array]
    step: Callable[[int, int], Array]
    cpu_s: Callable[[], float]
    sent_bytes: Callable[[], float]
    row_bytes: float


def id_batches(num_ids: int, num_rows: int) -> Array:
    """Returns ids of the table's rows, about by Zipf's law, of shape (NUM_BATCHES, num_ids).

    Rank r of n has the probability log(1 + 1 / r) / log(n + 1), so that a draw costs the same for
    any table. Popular rows are spread over the table.
    """
    even = np.random.default_rng(num_ids).random((NUM_BATCHES, num_ids))
    ranks = np.minimum((np.exp(even * np.log(num_rows + 1)) - 1).astype(np.int64), num_rows - 1)
    return (_GOLDEN * ranks + 40_503) % num_rows


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


def answer_tables(
    table: Table, options: TableOptions
) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Returns what answers questions about a table.

    Returns:
        Answers `{"kind": "pull" or "step", "num_ids": ..., "amount": ...}` with the seconds, the
        processor time and the sent bytes of so many calls; "check" after it was tried that rows are
        right before and after an update; and "memory" with the bytes of a row.
    """

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        kind, num_ids = question["kind"], question.get("num_ids", 0)
        if kind == "memory":
            return {"row_bytes": table.row_bytes}
        if kind == "check":
            _check(table, num_ids, options)
            return {}
        call = table.pull if kind == "pull" else table.step
        begun_s, cpu_s, sent = time.perf_counter(), table.cpu_s(), table.sent_bytes()
        for number in range(question["amount"]):
            call(num_ids, number % NUM_BATCHES)
        return {
            "seconds": time.perf_counter() - begun_s,
            "cpu_s": table.cpu_s() - cpu_s,
            "sent_bytes": table.sent_bytes() - sent,
        }

    return answer


def _check(table: Table, num_ids: int, options: TableOptions) -> None:
    """Refuses figures of a side that computes something else; its table must be new."""
    ids = id_batches(num_ids, options.num_rows)[0]
    before, at_update, after = (
        table.pull(num_ids, 0),
        table.step(num_ids, 0),
        table.pull(num_ids, 0),
    )
    asked = ids[: len(before)]
    _, place, counts = np.unique(ids, return_inverse=True, return_counts=True)
    wanted = (asked % _MODULUS)[:, None] * np.ones(options.row_size)
    moved = LEARNING_RATE * counts[place][: len(before), None]
    for got, expected in ((before, wanted), (at_update, wanted), (after, wanted - moved)):
        if not np.allclose(got, expected, rtol=1e-5, atol=1e-4):
            worst = np.abs(got - expected).max()
            raise RuntimeError(f"rows differ from what is right by up to {worst:g}")


def own_loopback() -> bool:
    """Gives this process a loopback interface of its own, which counts its bytes alone.

    Returns:
        False where that is not allowed: only root may.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "unshare") or libc.unshare(_CLONE_NEWNET) != 0:
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        request = struct.pack("16sh", b"lo", 0)
        flags = struct.unpack("16sh", fcntl.ioctl(one, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(one, _SIOCSIFFLAGS, struct.pack("16sh", b"lo", flags | _IFF_UP))
    return True


def loopback_bytes() -> float:
    """Returns the bytes that were sent over the loopback interface, with their headers."""
    for line in Path("/proc/self/net/dev").read_text("ascii").splitlines():
        name, _, figures = line.partition(":")
        if name.strip() == "lo":
            return float(figures.split()[8])
    return 0.0


def resident_bytes(processes: Sequence[int]) -> int:
    """Returns the resident memory of processes.

    Args:
        processes: their ids; 0 for this one.
    """
    total = 0
    for process in processes:
        status = Path(f"/proc/{process or 'self'}/status").read_text("utf-8")
        total += int(status.partition("VmRSS:")[2].split()[0]) * 1024
    return total
