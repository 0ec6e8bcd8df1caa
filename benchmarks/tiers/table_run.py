"""Measures a keyed table in memory, or with rows on disk: pulls and pushes of Zipf keys.

For 100 million rows of 64 float32, which need 32 GB of disk, or 58 with Adagrad:

    python -m benchmarks.tiers.table_run --rows 100000000 --memory-bytes 1000000000 --folder /disk
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.keyed_table import KeyedTable
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.server.server import ParameterServer
from stratagem.parameter_server.server.tables.row_formats import ROW_DTYPES, mix64

_FILLED = 100_000  # rows of a push that fills the table


class _Memory(threading.Thread):
    """Largest resident memory of this process, without pages of files."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_bytes = 0
        self.start()

    def run(self) -> None:
        while True:
            self.most_bytes = max(self.most_bytes, resident_bytes())
            time.sleep(0.2)


def resident_bytes() -> int:
    fields = Path("/proc/self/status").read_text(encoding="ascii").split("RssAnon:")[1]
    return int(fields.split()[0]) * 1024


def keys_of(ranks: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns keys of ranks. Rows are made in another order: frequent ones are anywhere."""
    step = 0x9E3779B1  # a prime
    return mix64((ranks.astype(np.uint64) * np.uint64(step)) % np.uint64(num_rows)).view(np.int64)


def zipf_keys(
    rng: np.random.Generator, count: int, num_rows: int, num_drawn: int | None = None
) -> np.ndarray:
    """Returns the distinct keys of `count` draws; a row of rank r is drawn in proportion to 1/r.

    With `num_drawn`, other rows than those of the first ranks are never drawn.
    """
    ranks = np.exp(rng.random(count) * np.log(num_drawn or num_rows)).astype(np.int64) - 1
    return keys_of(np.unique(np.clip(ranks, 0, num_rows - 1)), num_rows)


def adagrad() -> Any:
    """Returns the rule of Keras's Adagrad, with a learning rate of 1."""
    import keras

    import stratagem.keras
    from stratagem.parameter_server.keras.update_rule import KerasUpdate

    assert stratagem.keras
    return KerasUpdate(keras.optimizers.Adagrad(1.0, initial_accumulator_value=1.0))


def value_after(counts: np.ndarray, *, is_adagrad: bool) -> np.ndarray:
    """Returns the values of rows that began at 0, after so many gradients of 1."""
    if not is_adagrad:
        return -counts
    steps = 1 / np.sqrt(1 + np.arange(1, 1 + counts.max()))
    return -np.cumsum(steps)[counts.astype(np.int64) - 1]


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the time, and the CPU time of client and server."""
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin_s, time.process_time() - begin_cpu_s


def fill(client: KeyedTable, num_rows: int) -> None:
    """Makes all rows."""
    for first in range(0, num_rows, _FILLED):
        numbers = np.arange(first, min(first + _FILLED, num_rows), dtype=np.uint64)
        client.push(mix64(numbers).view(np.int64))


def check_values(
    client: KeyedTable, batches: list[np.ndarray], options: argparse.Namespace
) -> None:
    """Raises AssertionError if rows do not have the values that follow from the pushes."""
    some = np.unique(np.concatenate(batches[-3:]))[:20_000]
    counts = sum((np.isin(some, one).astype(np.float32) for one in batches), np.ones(len(some)))
    wanted = value_after(counts, is_adagrad=options.adagrad)
    rtol = 0.25 if options.storage_dtype else 1e-5  # bfloat16 has 8 bits for a count
    np.testing.assert_allclose(client.pull(some)[:, -1], wanted, rtol=rtol)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    keys, num_rows = ClusterKeys.make(), options.rows
    tiers = None
    if options.memory_bytes:
        tiers = {"memory_bytes": options.memory_bytes, "folder": str(folder / "tiers")}
    journal = folder / "journal" if options.journal else None
    before_bytes, memory = resident_bytes(), _Memory()
    with (
        ParameterServer(keys, journal=journal) as server,
        Connections(keys, [server.address]) as connections,
    ):
        client = KeyedTable(connections, options.width, options.storage_dtype)
        client.create(tiers, adagrad() if options.adagrad else None)
        fill_s = seconds(functools.partial(fill, client, num_rows))[0]
        batches = [
            zipf_keys(rng, options.batch, num_rows, options.drawn_rows)
            for _ in range(2 * options.steps)
        ]
        for one in batches[: options.steps]:  # until the frequent rows are in memory
            client.pull(one)
            client.push(one)
        before = client.table
        timed = batches[options.steps :]
        pairs = [
            (
                seconds(functools.partial(client.pull, one)),
                seconds(functools.partial(client.push, one)),
            )
            for one in timed
        ]
        table = client.table
        pulls, pushes = (np.array(one) for one in zip(*pairs, strict=True))
        num_keys = sum(len(one) for one in timed)
        check_values(client, batches, options)
        figures = {
            "fill_s": fill_s,
            "keys_a_step": num_keys / len(timed),
            "pull_s": float(np.median(pulls[:, 0])),
            "pull_cpu_s": float(np.median(pulls[:, 1])),
            "push_s": float(np.median(pushes[:, 0])),
            "push_cpu_s": float(np.median(pushes[:, 1])),
            "longest_s": float(max(pulls[:, 0].max(), pushes[:, 0].max())),
            "resident_bytes": resident_bytes() - before_bytes,
            "most_resident_bytes": memory.most_bytes - before_bytes,
            "load": os.getloadavg()[0],
            "table": table,
        }
        if tiers is not None:
            num_read = table["disk_reads"] - before["disk_reads"]
            figures["read_from_disk"] = num_read / num_keys
        if journal is not None:
            figures["journal_bytes"] = journal.stat().st_size
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--memory-bytes", type=int, default=0, help="0 for all rows in memory")
    parser.add_argument("--storage-dtype", choices=ROW_DTYPES, help="other than float32")
    parser.add_argument("--batch", type=int, default=10_000, help="draws of a step")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--drawn-rows", type=int, help="rows that steps draw from; default: all")
    parser.add_argument("--adagrad", action="store_true", help="one more float for each value")
    parser.add_argument("--journal", action="store_true")
    parser.add_argument("--folder", default=tempfile.gettempdir())
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        print(json.dumps({"options": vars(options), **measure(options, folder)}))
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
