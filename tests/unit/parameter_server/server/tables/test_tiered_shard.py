"""Keyed rows beyond a memory limit: the values are those of a table that is in memory."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError, UnavailableError
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


class Failing(Accumulator):
    def apply(self, state: Any, grads: Any) -> Any:
        raise FloatingPointError("no update")


def change(store: ServerVariables, step: int) -> None:
    """One of the changes that a server makes, drawn by the step."""
    rng = np.random.default_rng(step)
    keys = rng.permutation(rng.choice(KEYS, rng.choice([3, 30, 300]), replace=False))
    grads = rng.normal(size=(len(keys), DIM)).astype(np.float32)
    optimizer = "second" if "second" in store.optimizers and rng.random() < 0.3 else ""
    match rng.choice(["update", "update", "unread", "fails", "slots", "save"]):
        case "update":
            store.tiers.warm({"t": (keys, grads)})
            store.update({}, {"t": (keys, grads)}, {"t": optimizer})
        case "unread":  # what was dropped since is read in the update
            store.update({}, {"t": (keys, grads)}, {"t": optimizer})
        case "fails":
            with pytest.raises(FloatingPointError, match="no update"):
                store.update({}, {"t": (keys, grads)}, {"t": "failing"})
        case "slots" if "second" in store.optimizers:  # rows have the initial one when it is back
            store.drop_rule("second")
        case "slots":
            store.set_rule(Other("other"), ["t"], "second")
        case _:
            store.tiers.save()


@pytest.mark.parametrize("num_rows", [4, 64, 400])
@pytest.mark.parametrize(
    "options",
    [{}, OPTIONS, {"eviction": {"kind": "LeastRecent"}, "max_rows": 40}],
    ids=["all", "policies", "small"],
)
def test_rows_are_those_of_a_table_in_memory(tmp_path, options, num_rows) -> None:
    store, wanted = made(**options, **tiers(tmp_path, num_rows)), made(**options)
    both = (store, wanted)
    for one in both:
        one.set_rule(Failing("failing"), ["t"], "failing")
    for step in range(60):
        for one in both:
            change(one, step)
        if step % 5 == 0:
            assert_same(store, wanted)
    for one in both:
        one.set_rule(Other("other"), ["t"], "second")
    assert_same(store, wanted, "t:second.v", "t:failing.v")
    assert wanted.tables["t"]["evicted"] > 0 or not options
    assert store.tables["t"]["memory_hits"] > 0
    assert store.tables["t"]["disk_reads"] > 10 or num_rows == 400


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


def test_folder_in_use_is_refused(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    store = made(**tiers(tmp_path))
    with pytest.raises(UnavailableError, match="is in use by process"):
        made(**tiers(tmp_path))
    store.tiers.close(removes=True)
