"""Rows on disk and their journal: kills at each step of a write, and restarts."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.transport.journal import Journal
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import server as state_journal
from stratagem.parameter_server.server.changes import Changes, Lifetime
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.server import ServerState, StateJournal
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.table_requests import TableRequests
from stratagem.parameter_server.server.tables.disk_rows import DiskRows, RowFile
from stratagem.parameter_server.server.tables.row_formats import BUCKET_COUNT
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard
from tests.unit.parameter_server.server.tables.test_keyed_shard import (
    ALL_KEYS,
    OPTIONS,
    ROW_BYTES,
    RULE,
    assert_same,
    made,
    push,
    shard_of,
    spec,
    tiers,
    train,
)
from tests.unit.parameter_server.server.test_state_journal import read

LIMIT_ROWS = 24


class KilledError(BaseException):
    """The process ends here."""


class Server:
    """A state with a journal and rows on disk in a folder, and the same table in memory.

    `wanted` has the rows and counters of each version that was written to the journal.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        self.options = {**options, **tiers(folder / "tiers", LIMIT_ROWS)}
        self.state, self.journal = started(folder, self.options)
        self.reference = made(**options)
        self.wanted: dict[int, list[Any]] = {}
        self.steps: list[int] = []

    def run(self, steps: range) -> None:
        for step in steps:
            self.update(step)
            self.journal.write()

    def update(self, step: int, *, warms: bool = True) -> None:
        self.steps.append(step)
        train(self.state.store, step, warms=warms)
        self.repeat([step])

    def repeat(self, steps: list[int]) -> None:
        """Gives the table in memory the updates that the journal has."""
        for step in steps:
            train(self.reference, step)
        self.wanted[self.reference.version] = rows_of(self.reference)

    def kill(self) -> None:
        self.state.store.tiers.close()
        self.journal._journal.close()


def started(folder: Path, options: dict[str, Any]) -> tuple[ServerState, StateJournal]:
    state, journal = read(folder / "journal")
    state.store.create(spec(**options))
    state.pushes.set_rule(RULE, ["t"])
    return state, StateJournal(journal, state, 1e6)


def fail(*args: Any) -> None:
    raise OSError("disk full")


def rows_of(store: ServerVariables) -> list[Any]:
    table = store.tables["t"]
    counters = [table[name] for name in ("rows", "created", "evicted", "refused_updates")]
    return [store.pull_rows("t", ALL_KEYS), store.pull_rows("t:v", ALL_KEYS), counters]


def assert_lost(path: Path, match: str) -> None:
    store, lifetime = ServerVariables(), Lifetime(1)
    changes = Changes(lambda message, outcome: message)
    state = ServerState(store, Pushes(store, lifetime), changes, lifetime)
    with Journal(path) as journal, contextlib.closing(store.tiers):
        with pytest.raises(DataLossError, match=match):
            state.restore(journal.messages)
        journal.messages.clear()


@pytest.fixture
def server(tmp_path) -> Iterator[Callable[..., Server]]:
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> Server:
            one = Server(tmp_path, **options)
            stack.callback(one.kill)
            return one

        yield start


@pytest.fixture(autouse=True)
def _fast_disk(monkeypatch) -> None:
    """No test stops the machine, so none needs to wait for the disk."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(os, "fdatasync", lambda file: None)


@pytest.fixture
def small_journals(monkeypatch) -> None:
    monkeypatch.setattr(state_journal, "_SLACK_BYTES", 20_000)
    monkeypatch.setattr(state_journal, "_MOST_TIMES", 0)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["all", "policies"])
@pytest.mark.usefixtures("small_journals")
def test_state_is_the_same_after_restarts(tmp_path, server, options) -> None:
    one = server(**options)
    num_rewritten = 0
    for first in range(0, 40, 8):
        for step in range(first, first + 8):
            before = one.journal._journal.size_bytes
            one.run(range(step, step + 1))
            num_rewritten += one.journal._journal.size_bytes < before
        assert_same(one.state.store, one.reference)
        one.kill()
        one.state, one.journal = started(tmp_path, one.options)
        assert_same(one.state.store, one.reference)
    table = one.state.store.tables["t"]
    assert num_rewritten > 3
    assert table["rows"] > 3 * LIMIT_ROWS
    assert table["disk_bytes"] > 0
    assert shard_of(one.state.store)._num_places < 6 * LIMIT_ROWS


class Kills:
    """Raises `KilledError` at a step of a write, of which a part is made.

    With `loses_writes`, the machine stops: some writes that are not synced are lost.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, loses_writes: bool) -> None:
        self.begin(-1)
        self._loses_writes = loses_writes
        self._unsynced: list[tuple[Path, int, bytes]] = []
        self._patch(monkeypatch, RowFile, "_write", self._write)
        self._patch(monkeypatch, RowFile, "sync", self._sync)
        for owner, name in (
            (DiskRows, "_write_manifest"),
            (Journal, "append"),
            (Journal, "replace"),
        ):
            self._patch(monkeypatch, owner, name, self._whole)

    def begin(self, step: int) -> None:
        """Kills at this step from now on; -1 for never."""
        self._left, self._num_steps = step, 0

    def end(self) -> int:
        """Returns the number of steps since `begin`, and kills at none from now on."""
        num_steps = self._num_steps
        self.begin(-1)
        return num_steps

    def _patch(self, monkeypatch: Any, owner: Any, name: str, wrapper: Any) -> None:
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: wrapper(original, *args))

    def _whole(self, original: Any, *args: Any) -> None:
        self._step()
        original(*args)
        self._step()

    def _write(self, original: Any, file: Any, data: memoryview, begin: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{file._file}"))
        self._unsynced.append((path, begin, os.pread(file._file, len(data), begin)))
        self._step(lambda: original(file, data[: len(data) // 2 + 1], begin))
        original(file, data, begin)

    def _sync(self, original: Any, file: Any) -> None:
        self._step()
        original(file)
        path = Path(os.readlink(f"/proc/self/fd/{file._file}"))
        self._unsynced = [one for one in self._unsynced if one[0] != path]

    def _step(self, part: Callable[[], None] | None = None) -> None:
        self._num_steps += 1
        self._left -= 1
        if self._left:
            return
        if part is not None:
            part()
        if self._loses_writes:
            rng = np.random.default_rng(self._num_steps)
            for path, begin, data in reversed(self._unsynced):
                if rng.random() < 0.5:
                    with path.open("r+b") as file:
                        os.pwrite(file.fileno(), data, begin)
        raise KilledError


@pytest.mark.slow
@pytest.mark.parametrize("loses_writes", [False, True], ids=["process", "machine"])
@pytest.mark.usefixtures("small_journals")
def test_kill_at_any_step_of_a_flush(tmp_path, monkeypatch, loses_writes) -> None:
    kills = Kills(monkeypatch, loses_writes=loses_writes)
    live, saved = tmp_path / "live", tmp_path / "saved"
    flush, write = TieredShard.flush, DiskRows.write

    def after_update(original: Any, *args: Any) -> None:
        """Changes rows first, which the last journal entry does not have."""
        servers[-1].update(1000 + len(servers[-1].steps), warms=False)
        original(*args)

    def run_until(step: int) -> int:
        """Begins with the same state, is killed at a step, and starts again."""
        shutil.rmtree(live)
        shutil.copytree(saved, live)
        one = Server(live, **OPTIONS)
        one.repeat(servers[0].steps[:num_journaled])
        servers.append(one)
        kills.begin(step)
        with contextlib.suppress(KilledError), monkeypatch.context() as patch:
            patch.setattr(TieredShard, "flush", lambda *args: after_update(flush, *args))
            patch.setattr(DiskRows, "write", lambda *args: after_update(write, *args))
            one.run(range(20, 23))
        num_steps = kills.end()
        one.kill()
        state, journal = read(live / "journal")
        version = state.store.version
        for got, wanted in zip(rows_of(state.store), one.wanted[version], strict=True):
            np.testing.assert_array_equal(got, wanted)
        state.store.tiers.close()
        journal.close()
        versions.add(version)
        return num_steps

    servers = [Server(live, **OPTIONS)]
    versions: set[int] = set()
    servers[0].run(range(18))
    num_journaled = len(servers[0].steps)
    servers[0].kill()
    shutil.copytree(live, saved)
    num_steps = run_until(-1)
    assert num_steps > 20
    for step in range(1 + loses_writes, num_steps, num_steps // 10):
        run_until(step)
    assert len(versions) >= 3


def test_journal_that_ends_before_the_rows_on_disk(tmp_path, server) -> None:
    one = server()
    one.run(range(8))
    size = one.journal._journal.size_bytes
    one.run(range(8, 20))
    one.kill()
    with (tmp_path / "journal").open("r+b") as file:
        file.truncate(size)
    assert_lost(tmp_path / "journal", "the journal ends before the last entry whose rows")


def flip(path: Path) -> None:
    data = np.fromfile(path, np.uint8)
    data[40:3000:32] ^= 1
    path.write_bytes(data.tobytes())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (shutil.rmtree, r"it has no valid rows\.json \(FileNotFoundError\)"),
        (lambda folder: (folder / "rows.json").write_text("{}"), r"\(KeyError\)"),
        (
            lambda folder: (folder / "rows.json").write_text(
                '{"id": "other", "format": 1, "position": [0, 0], "groups": []}'
            ),
            "its rows are of another journal",
        ),
        (lambda folder: flip(folder / "keys"), "of its keys are damaged"),
    ],
    ids=["folder", "manifest", "other", "keys"],
)
def test_rows_on_disk_that_do_not_fit_the_journal(
    tmp_path, server, small_journals, change, match
) -> None:
    one = server()
    one.run(range(20))
    one.kill()
    (folder,) = (tmp_path / "tiers").glob("*-0")
    change(folder)
    assert_lost(tmp_path / "journal", match)


def test_disk_that_is_full_keeps_rows_in_memory(tmp_path, server, monkeypatch) -> None:
    one = server()

    with monkeypatch.context() as patch:
        patch.setattr(RowFile, "_write", fail)
        for step in range(10):
            with contextlib.suppress(OSError):
                one.run(range(step, step + 1))
        assert one.journal.error == "OSError: disk full"
        assert_same(one.state.store, one.reference)
        assert one.state.store.tables["t"]["hot"] > LIMIT_ROWS
    one.run(range(10, 12))
    assert one.journal.error is None
    one.run(range(12, 20))
    assert_same(one.state.store, one.reference)
    assert one.state.store.tables["t"]["unflushed"] < LIMIT_ROWS


# Saved rows that are loaded into tables with files of rows: memory, restarts and kills.

FIELDS = {"table": "t", "part": 0, "base": None, "file": "t.rows"}


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
        train(store, step)
    return store


def folders(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir() if one.is_dir())


def test_loading_uses_no_memory_for_rows(tmp_path) -> None:
    source = made()
    push(source, np.arange(50_000))
    request = save(source, tmp_path)
    store = made(**tiers(tmp_path / "tiers", LIMIT_ROWS))
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
            train(one, step)
    assert_same(store, wanted)
    store.tiers.close(removes=True)


def test_load_that_fails_leaves_the_former_rows(tmp_path, monkeypatch) -> None:
    request = save(trained(range(30)), tmp_path)
    store, wanted = made(**tiers(tmp_path / "tiers")), made()
    for one in (store, wanted):
        train(one, 50)

    with monkeypatch.context() as patch:
        patch.setattr(DiskRows, "sync", fail)
        with pytest.raises(OSError, match="disk full"):
            TableRequests(store).load(request)
    assert_same(store, wanted)
    assert len(folders(tmp_path / "tiers")) == 1
    for step in range(51, 60):
        for one in (store, wanted):
            train(one, step)
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
        train(first.reference, step)
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
                train(state.store, number)
                journal.write()
        num_steps = kills.end()
        state.store.tiers.close()
        journal._journal.close()
        state, journal = started(live, first.options)
        rows = rows_of(state.store)
        pairs = [zip(rows, one, strict=True) for one in wanted]
        are_equal = [all(np.array_equal(*pair) for pair in one) for one in pairs]
        assert are_equal.count(True) == 1, step
        found.add(are_equal.index(True))
        state.store.tiers.close()
        journal._journal.close()
        return num_steps

    num_steps = run_until(-1)
    assert num_steps > 20
    for step in range(1 + loses_writes, num_steps, max(1, num_steps // 16)):
        run_until(step)
    assert {0, 4} < found
