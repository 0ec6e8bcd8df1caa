"""Measures one storage engine, with files that are not in memory when a batch begins."""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from benchmarks.tiers.engines import ENGINES, RowStorage

_LOADED, _BATCH, _NUM_BATCHES, _NUM_THREADS = 2**14, 2000, 10, 16


def measure(name: str, num_rows: int, width: int, folder: Path) -> dict[str, float]:
    """Returns seconds for each row, and bytes: of reads and writes, the best batch."""
    rng = np.random.default_rng(0)
    engine = ENGINES[name](folder, width)
    drop = functools.partial(drop_cache, folder)
    batches = iter([chosen(rng, num_rows) for _ in range(3 * _NUM_BATCHES)])
    written: list[np.ndarray] = []

    def load() -> None:
        for first in range(0, num_rows, _LOADED):
            numbers = np.arange(first, min(first + _LOADED, num_rows))
            engine.put(numbers, rows_of(numbers, 0))
        engine.sync()

    def get() -> None:
        engine.get(next(batches))

    def put() -> None:
        written.append(next(batches))
        engine.put(written[-1], rows_of(written[-1], 1))

    def put_all() -> None:
        for _ in range(_NUM_BATCHES):
            put()
        engine.sync()

    figures: dict[str, float] = {}

    def record(name: str, times: list[tuple[float, float]], count: int) -> None:
        for kind, own in zip(("s", "cpu_s"), zip(*times, strict=True), strict=True):
            figures[f"{name}_{kind}"] = min(own) / count

    record("load", [seconds(load)], num_rows)
    figures["disk_bytes"] = engine.size_bytes
    before_bytes = disk_bytes("read")
    record("get", [seconds(get, drop) for _ in range(_NUM_BATCHES)], _BATCH)
    figures["get_read_bytes"] = (disk_bytes("read") - before_bytes) / (_BATCH * _NUM_BATCHES)
    with ThreadPoolExecutor(_NUM_THREADS) as threads:

        def get_in_threads() -> None:
            list(threads.map(engine.get, np.array_split(next(batches), _NUM_THREADS)))

        record("threads", [seconds(get_in_threads, drop) for _ in range(_NUM_BATCHES)], _BATCH)
    before_bytes = disk_bytes("write")
    drop()
    record("put", [seconds(put_all)], _BATCH * _NUM_BATCHES)
    written_bytes = disk_bytes("write") - before_bytes
    figures["put_written_bytes"] = written_bytes / (_BATCH * _NUM_BATCHES)
    figures["grown_bytes"] = engine.size_bytes
    check(engine, written)
    engine.close()
    return figures


def disk_bytes(kind: str) -> int:
    """Returns the bytes that this process has read from disk, or written."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(dict(line.split(": ") for line in lines)[f"{kind}_bytes"])


def drop_cache(folder: Path) -> None:
    """Removes the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDWR)
            os.fdatasync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def rows_of(numbers: np.ndarray, version: int) -> np.ndarray:
    width = int(sys.argv[3])
    return (numbers[:, None] * 7 + np.arange(width) + version).astype(np.float32)


def chosen(rng: np.random.Generator, num_rows: int) -> np.ndarray:
    return np.unique(rng.integers(0, num_rows, _BATCH))


def check(engine: RowStorage, written: list[np.ndarray]) -> None:
    numbers = np.unique(np.concatenate(written))[::20]
    np.testing.assert_array_equal(engine.get(numbers), rows_of(numbers, 1))
    engine.delete(numbers[:1])


def seconds(
    work: Callable[[], None], before: Callable[[], None] | None = None
) -> tuple[float, float]:
    """Returns the time, and the CPU time of all threads."""
    if before is not None:
        before()
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


if __name__ == "__main__":
    folder = Path(tempfile.mkdtemp(dir=sys.argv[4]))
    try:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), folder)))
    finally:
        shutil.rmtree(folder)
