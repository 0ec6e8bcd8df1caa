"""Keyed rows beyond a memory limit: the values are those of a table that is in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard
from tests.unit.parameter_server.server.tables.test_keyed_shard import (
    DIM,
    OPTIONS,
    Accumulator,
    Other,
    initial,
    made,
    push,
)

LIMIT_ROWS = 64
ROW_BYTES = 4 * DIM
KEYS = np.arange(-120, 420)


def tiers(folder: Path, num_rows: int = LIMIT_ROWS, num_arrays: int = 2) -> dict[str, Any]:
    return {"tiers": {"memory_bytes": num_rows * num_arrays * ROW_BYTES, "folder": str(folder)}}


def shard_of(store: ServerVariables) -> TieredShard:
    shard = store._shards["t"]
    assert isinstance(shard, TieredShard)
    return shard


def update(store: ServerVariables, step: int, optimizer: str = "", *, warms: bool = True) -> None:
    """As a server does, which reads rows from disk before the change."""
    rng = np.random.default_rng(step)
    keys = rng.permutation(np.unique(rng.zipf(1.2, 60) % 400 - 100))
    grads = rng.normal(size=(len(keys), DIM)).astype(np.float32)
    if warms:
        store.tiers.warm({"t": (keys, grads)})
    store.update({}, {"t": (keys, grads)}, {"t": optimizer})


def assert_same(got: ServerVariables, wanted: ServerVariables, *names: str) -> None:
    for name in ("t", "t:v", *names):
        np.testing.assert_array_equal(got.pull_rows(name, KEYS), wanted.pull_rows(name, KEYS))
    for name, count in wanted.tables["t"].items():
        if name not in ("bytes", "hot"):
            assert got.tables["t"][name] == count


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["all", "policies"])
def test_rows_are_those_of_a_table_in_memory(tmp_path, options) -> None:
    store, wanted = made(**options, **tiers(tmp_path)), made(**options)
    for one in (store, wanted):
        one.set_rule(Other("other"), ["t"], "second")
    for step in range(60):
        for one in (store, wanted):
            update(one, step, "second" if step % 3 == 2 else "")
        if step % 5 == 0:
            assert_same(store, wanted, "t:second.v")
    assert_same(store, wanted, "t:second.v")
    assert wanted.tables["t"]["evicted"] > 0 or not options
    table = store.tables["t"]
    assert table["rows"] > LIMIT_ROWS > table["unflushed"]
    assert table["disk_reads"] > 100
    assert table["memory_hits"] > 100
    assert table["disk_bytes"] > 0


def test_memory_has_the_limit_and_the_disk_has_the_rest(tmp_path) -> None:
    store = made(**tiers(tmp_path, 5000))
    for first in range(0, 60_000, 500):
        keys = np.arange(first, first + 500)
        store.tiers.warm({"t": (keys, keys)})
        push(store, keys)
    table = store.tables["t"]
    assert table["rows"] == 60_000
    assert table["hot"] <= 5000
    assert table["unflushed"] <= 0.75 * 5000 + 500
    assert table["disk_written_bytes"] > 50_000 * 2 * ROW_BYTES
    shard = shard_of(store)
    places = shard._num_places
    assert places <= 5000
    keys = np.arange(0, 60_000, 7)
    wanted = initial(keys) - np.float32(0.1) * np.float32(0.5 * 0.25 + 1)
    np.testing.assert_allclose(store.pull_rows("t", keys), wanted, rtol=1e-5, atol=1e-6)
    assert store.tables["t"]["hot"] <= 5000  # also after pulls
    store.pull_rows("t", keys[-50:])
    table = store.tables["t"]
    store.pull_rows("t", keys[-50:])  # in memory by now
    assert store.tables["t"]["disk_reads"] == table["disk_reads"]
    assert store.tables["t"]["memory_hits"] == table["memory_hits"] + 50


def test_an_update_larger_than_memory(tmp_path) -> None:
    store, wanted = made(**tiers(tmp_path, 4)), made()
    for step in range(6):
        for one in (store, wanted):
            keys = np.arange(step, 300)
            one.tiers.warm({"t": (keys, keys)})
            push(one, keys, step)
    assert_same(store, wanted)


def test_an_update_reads_what_was_dropped_since(tmp_path) -> None:
    store, wanted = made(**tiers(tmp_path, 8)), made()
    for step in range(30):  # without `warm`: all rows are read in the update
        for one in (store, wanted):
            keys = np.random.default_rng(step).permutation(100)[:20]
            push(one, keys, step)
        store.tiers.save()
    assert_same(store, wanted)


def test_slots_that_are_added_and_dropped_later(tmp_path) -> None:
    store, wanted = made(**tiers(tmp_path)), made()
    both = (store, wanted)
    for step in range(40):
        for one in both:
            if step in (10, 30):
                one.set_rule(Other("other"), ["t"], "second")
            if step == 20:
                one.drop_rule("second")
            is_second = step % 4 == 0 and (10 <= step < 20 or step >= 30)
            update(one, step, "second" if is_second else "")
    for one in both:
        assert "second.v" in one._shards["t"].slots
    # Rows that have no value since the slot was added again have the initial one.
    assert_same(store, wanted, "t:second.v")


def test_failed_update_leaves_rows_and_can_be_followed_by_others(tmp_path) -> None:
    class Failing(Accumulator):
        def apply(self, state: Any, grads: Any) -> Any:
            raise FloatingPointError("no update")

    store, wanted = made(**tiers(tmp_path, 16)), made()
    store.set_rule(Failing(), ["t"], "failing")
    wanted.set_rule(Failing(), ["t"], "failing")
    for step in range(20):
        for one in (store, wanted):
            update(one, step)
            with pytest.raises(FloatingPointError, match="no update"):
                update(one, step + 1000, "failing")
    assert_same(store, wanted, "t:failing.v")


def test_full_table_that_is_smaller_than_its_memory_evicts(tmp_path) -> None:
    """New rows take over the slots of evicted ones, and the memory of these."""
    options = {"eviction": {"kind": "LeastRecent"}, "max_rows": 40}
    store, wanted = made(**options, **tiers(tmp_path)), made(**options)
    for step in range(40):
        for one in (store, wanted):
            update(one, step)
            one.scatter("t", KEYS[step : step + 9], np.ones((9, DIM), np.float32), sign=1)
    assert_same(store, wanted)
    assert store.tables["t"]["evicted"] > 100


def test_scatter_reads_and_makes_rows(tmp_path) -> None:
    store, wanted = made(**tiers(tmp_path, 16)), made()
    for step in range(10):
        for one in (store, wanted):
            update(one, step)
            one.scatter("t", np.arange(0, 390, 3), np.ones((130, DIM), np.float32), sign=1)
            one.scatter("t:v", np.arange(380, 390), np.full((10, DIM), step, np.float32))
        store.tiers.save()
    assert_same(store, wanted)


@pytest.mark.slow
def test_pulls_see_whole_rows_while_others_come_and_go(tmp_path) -> None:
    store = made(eviction={"kind": "LeastRecent"}, max_rows=1500, **tiers(tmp_path, 200))
    is_over = threading.Event()

    def pull() -> None:
        rng = np.random.default_rng(1)
        while not is_over.is_set():
            keys = rng.integers(0, 3000, 200)
            moved = store.pull_rows("t", keys) - initial(keys)  # the same for all columns
            np.testing.assert_allclose(moved, moved[:, :1] * np.ones(DIM), atol=1e-5)

    with ThreadPoolExecutor(3) as threads:
        pulls = [threads.submit(pull) for _ in range(2)]
        rng = np.random.default_rng(2)
        try:
            for _ in range(150):
                keys = np.unique(rng.integers(0, 3000, 100))
                store.tiers.warm({"t": (keys, keys)})
                push(store, keys)
        finally:
            is_over.set()
        for one in pulls:
            one.result()
    table = store.tables["t"]
    assert table["evicted"] > 100
    assert table["disk_reads"] > 1000


def test_damaged_row_is_reported_and_not_used(tmp_path) -> None:
    store = made(**tiers(tmp_path, 8))
    for first in range(0, 100, 10):
        push(store, np.arange(first, first + 10))
        store.tiers.save()
    (path,) = tmp_path.glob("*/rows-0")
    data = bytearray(path.read_bytes())
    data[20] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLossError, match="cannot be used: a row is damaged"):
        store.pull_rows("t", np.arange(100))


def test_new_table_begins_without_the_rows_of_an_earlier_one(tmp_path) -> None:
    store = made(**tiers(tmp_path, 8))
    for _ in range(3):
        push(store, np.arange(100))
        store.tiers.save()
    store.tiers.close()
    store = made(**tiers(tmp_path, 8))
    np.testing.assert_array_equal(store.pull_rows("t", KEYS), initial(KEYS))
    store.tiers.close(removes=True)
    assert not list(tmp_path.glob("*"))
