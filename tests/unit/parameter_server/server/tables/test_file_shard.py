"""Saved rows that are loaded into tables with files of rows: memory, restarts and kills."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.table_requests import TableRequests
from stratagem.parameter_server.server.tables.disk_rows import DiskRows
from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT
from tests.unit.parameter_server.server.tables.test_keyed_shard import OPTIONS, made, push
from tests.unit.parameter_server.server.tables.test_tiered_journal import (
    KilledError,
    Kills,
    Server,
    assert_equal,
    rows_of,
    started,
)
from tests.unit.parameter_server.server.tables.test_tiered_shard import (
    LIMIT_ROWS,
    ROW_BYTES,
    assert_same,
    shard_of,
    tiers,
    update,
)

FIELDS = {"table": "t", "part": 0, "base": None, "file": "t.rows"}


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch) -> None:
    """No test stops the machine, so none needs to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


def save(store: ServerVariables, folder: Path) -> Message:
    """Saves a table, and returns the request that loads it."""
    fields = {"folder": str(folder), "save": "first", "tables": {"t": FIELDS}}
    (part,) = TableRequests(store)._saved(fields).fields["parts"].values()
    buckets = [0, BUCKET_COUNT]
    chain = {"files": [[FIELDS["file"], part["size_bytes"], "first"]], "buckets": buckets}
    own = {"buckets": buckets, "chains": [chain], "save": "first", "storage_dtype": None}
    return Message("load_tables", {"folder": str(folder), "tables": {"t": own}})


def trained(steps: range, **options: Any) -> ServerVariables:
    store = made(**options)
    for step in steps:
        update(store, step)
    return store


def folders(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.is_dir())


def test_loading_uses_no_memory_for_rows(tmp_path) -> None:
    source = made()
    push(source, np.arange(50_000))
    request = save(source, tmp_path)
    store = made(**tiers(tmp_path / "tiers"))
    push(store, np.arange(-LIMIT_ROWS // 4, 0))
    old = shard_of(store)
    TableRequests(store).load(request)
    table, shard = store.tables["t"], shard_of(store)
    assert (table["rows"], table["hot"], table["unflushed"]) == (50_000, 0, 0)
    assert len(shard.value) == 0
    assert len(old.value) <= LIMIT_ROWS
    assert table["disk_written_bytes"] > 50_000 * 2 * ROW_BYTES
    assert len(folders(tmp_path / "tiers")) == 1  # without a journal, nothing needs the former rows
    assert_same(store, source)
    keys = np.arange(0, 50_000, 11)
    np.testing.assert_array_equal(store.pull_rows("t", keys), source.pull_rows("t", keys))
    assert store.tables["t"]["hot"] <= LIMIT_ROWS
    store.tiers.close(removes=True)
    assert not (tmp_path / "tiers").exists()


def test_optimizer_slots_that_were_not_saved_have_their_initial_value(tmp_path) -> None:
    source = trained(range(5))
    source.drop_rule("")
    request = save(source, tmp_path)
    store, wanted = made(**tiers(tmp_path / "tiers")), made()
    for one in (store, wanted):
        TableRequests(one).load(request)
        assert (one.pull_rows("t:v", np.arange(-100, 300)) == 0.25).all()
    assert_same(store, wanted)
    for step in range(5, 30):
        for one in (store, wanted):
            update(one, step)
    assert_same(store, wanted)
    store.tiers.close(removes=True)


def test_load_that_fails_leaves_the_former_rows(tmp_path, monkeypatch) -> None:
    request = save(trained(range(30)), tmp_path)
    store, wanted = made(**tiers(tmp_path / "tiers")), made()
    for one in (store, wanted):
        update(one, 50)

    def fail(*args: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(DiskRows, "sync", fail)
        with pytest.raises(OSError, match="disk full"):
            TableRequests(store).load(request)
    assert_same(store, wanted)
    assert len(folders(tmp_path / "tiers")) == 1
    for step in range(51, 60):
        for one in (store, wanted):
            update(one, step)
    assert_same(store, wanted)
    store.tiers.close(removes=True)


def test_loads_before_a_journal_entry_keep_the_rows_that_the_journal_has(tmp_path) -> None:
    """Also those between: the journal may name any of them."""
    request = save(trained(range(30, 50)), tmp_path)
    one = Server(tmp_path / "live")
    one.run(range(10))
    for _ in range(2):
        TableRequests(one.state.store).load(request)
    assert len(folders(tmp_path / "live" / "tiers")) == 3
    one.kill()  # nothing of this is in the journal
    one.state, one.journal = started(tmp_path / "live", one.options)
    assert_same(one.state.store, one.reference)
    assert len(folders(tmp_path / "live" / "tiers")) == 1
    TableRequests(one.state.store).load(request)
    one.journal.write()
    (folder,) = folders(tmp_path / "live" / "tiers")
    assert folder.endswith(f"+{shard_of(one.state.store)._disk.rows_id}")
    one.kill()


@pytest.mark.slow
@pytest.mark.parametrize("loses_writes", [False, True], ids=["process", "machine"])
def test_kill_at_any_step_of_a_load(tmp_path, monkeypatch, loses_writes) -> None:
    kills = Kills(monkeypatch, loses_writes=loses_writes)
    request = save(trained(range(30, 60), **OPTIONS), tmp_path)
    live, saved = tmp_path / "live", tmp_path / "saved"
    first = Server(live, **OPTIONS)
    first.run(range(18))
    wanted = [rows_of(first.reference)]
    TableRequests(first.reference).load(request)
    wanted.append(rows_of(first.reference))
    for step in range(60, 63):
        update(first.reference, step)
        wanted.append(rows_of(first.reference))
    first.kill()
    shutil.copytree(live, saved)
    found: set[int] = set()

    def run_until(step: int) -> int:
        """Begins with the same state, is killed at a step, and starts again."""
        shutil.rmtree(live)
        shutil.copytree(saved, live)
        state, journal = started(live, first.options)
        kills.begin(step)
        with contextlib.suppress(KilledError):
            TableRequests(state.store).load(request)
            journal.write()
            for number in range(60, 63):
                update(state.store, number)
                journal.write()
        num_steps = kills.end()
        state.store.tiers.close()
        journal._journal.close()
        state, journal = started(live, first.options)
        rows = rows_of(state.store)
        versions = [number for number, one in enumerate(wanted) if _are_equal(rows, one)]
        assert len(versions) == 1, step
        found.update(versions)
        state.store.tiers.close()
        journal._journal.close()
        return num_steps

    num_steps = run_until(-1)
    assert num_steps > 20
    for step in range(1 + loses_writes, num_steps, max(1, num_steps // 16)):
        run_until(step)
    assert {0, 4} < found


def _are_equal(one: list[Any], other: list[Any]) -> bool:
    with contextlib.suppress(AssertionError):
        assert_equal(one, other)
        return True
    return False
