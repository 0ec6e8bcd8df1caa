"""What a server holds, written while it changes and read again."""

from __future__ import annotations

import itertools
import os
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.group.transport.journal import Journal
from stratagem.group.transport.listener import Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.server import server as state_journal
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.changes import Changes
from stratagem.parameter_server.server.pushes import Pushes
from stratagem.parameter_server.server.server import ServerState, StateJournal, next_lifetime
from stratagem.parameter_server.server.shards import ShardSpec, UpdateMode
from stratagem.parameter_server.server.store import Marks, ServerVariables
from tests.unit.parameter_server.server.test_server import full_disk
from tests.unit.parameter_server.server.update_rules import Momentum

NAMES = ["v", "b", "table", "v:v", "table:v"]
RULE = Momentum()


def read(path: Path) -> tuple[ServerState, Journal]:
    """What a server that is started on this file has."""
    journal = Journal(path)
    lifetime = next_lifetime(journal.messages)
    store = ServerVariables()
    changes = Changes(lambda message, outcome: Message("ok", dict(outcome)))
    state = ServerState(store, Pushes(store, lifetime), changes, lifetime)
    state.restore(journal.messages)
    return state, journal


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "journal"


@pytest.fixture
def written(path) -> Iterator[tuple[ServerState, StateJournal]]:
    """A state with variables, and its journal, which writes only when it is told to."""
    state, journal = read(path)
    rng = np.random.default_rng(0)
    for name, shape in {"v": (4, 3), "b": (), "table": (500, 2)}.items():
        spec = ShardSpec(name, shape, "float32", has_rows=name == "table")
        state.store.create(spec, lambda shape=shape: rng.normal(size=shape))
    state.pushes.set_rule(RULE, ["v", "b", "table"], UpdateMode(max_staleness=3))
    yield state, StateJournal(journal, state, 1e6)
    journal.close()


def update(state: ServerState, seed: int) -> None:
    """One of everything dense, and of a few rows."""
    rng = np.random.default_rng(seed)
    whole = {"v": rng.normal(size=(4, 3)), "b": rng.normal(size=())}
    rows = np.sort(rng.choice(500, 5, replace=False))
    state.store.update(whole, {"table": (rows, rng.normal(size=(5, 2)))})


def done(state: ServerState, client: str, number: int) -> None:
    request = Request(Message("x", {"client": client, "number": number}), lambda message: None)
    change = state.changes.begin(request)
    assert change is not None
    change.done(number=number)


def assert_same(got: ServerState, wanted: ServerState) -> None:
    assert sorted(got.store.names) == sorted(wanted.store.names)
    values = zip(NAMES, got.store.pull(NAMES), wanted.store.pull(NAMES), strict=True)
    for name, one, other in values:
        np.testing.assert_array_equal(one, other, err_msg=name)
        assert one.dtype == other.dtype
    assert got.store.scalars == wanted.store.scalars
    assert got.store.version == got.lifetime.restored_version == wanted.store.version
    assert got.changes.saved() == wanted.changes.saved()
    assert got.pushes.mode == wanted.pushes.mode


def restored(path: Path) -> ServerState:
    state, journal = read(path)
    journal.close()
    return state


def assert_read(path: Path, wanted: ServerState) -> None:
    assert_same(restored(path), wanted)


def test_optimizers_are_there_again_and_those_that_were_dropped_are_not(path, written) -> None:
    state, journal = written
    update(state, 0)
    state.pushes.set_rule(RULE, ["v", "table"], UpdateMode(), "second")
    rows = (np.array([3]), np.ones((1, 2)))
    state.store.update({"v": np.ones((4, 3))}, {"table": rows}, {"v": "second", "table": "second"})
    journal.write()
    got = restored(path)
    assert_same(got, state)
    names = ["v:second.v", "table:second.v"]
    np.testing.assert_array_equal(got.store.pull(names)[1], state.store.pull(names)[1])
    assert got.store.scalars == {"count": 1, "second.count": 1}
    assert got.store.optimizers == {"": {"name": "momentum"}, "second": {"name": "momentum"}}
    assert got.store.missing_rules(["", "second", "third"]) == ["", "second"]
    got.pushes.set_rule(RULE, ["v", "table"], None, "second")
    assert got.store.missing_rules(["", "second"]) == [""]
    assert got.store.scalars == {"count": 1, "second.count": 1}
    state.store.drop_rule("")
    journal.write()
    got = restored(path)
    assert got.store.scalars == {"second.count": 1}
    np.testing.assert_array_equal(got.store.pull(names)[0], np.ones((4, 3)))
    for name in ("v:v", "table:v"):
        with pytest.raises(KeyError, match=f"no variable '{name}' on this server"):
            got.store.pull([name])


def test_entry_holds_what_has_changed_only(path, written) -> None:
    state, journal = written
    journal.write()
    before = path.stat().st_size
    journal.write()
    assert path.stat().st_size == before
    state.store.scatter("table", np.array([3, 400]), np.ones((2, 2)))
    journal.write()
    with Journal(path) as file:
        (part,) = file.messages[-1].fields["parts"]
        assert part["spec"]["name"] == "table"
        np.testing.assert_array_equal(file.messages[-1].arrays[0], [3, 400])
    assert path.stat().st_size < before + 2000
    done(state, "client", 1)  # whatever it was that it asked for
    journal.write()
    assert_read(path, state)


def test_entry_of_a_narrow_table_adds_what_has_changed(path, monkeypatch) -> None:
    monkeypatch.setattr(state_journal, "_SLACK_BYTES", 0)
    monkeypatch.setattr(state_journal, "_MOST_COPIED_BYTES", 0)
    state, file = read(path)
    spec = ShardSpec("table", (10_000, 1), "float32", has_rows=True)
    state.store.create(spec, lambda: np.zeros((10_000, 1), np.float32))
    journal = StateJournal(file, state, 1e6)
    journal.write()
    before = path.stat()
    assert before.st_size > 2 * state.store.size_bytes  # each row has its number, too
    for row in range(3):
        state.store.scatter("table", np.array([row]), np.ones((1, 1), np.float32))
        journal.write()
    after = path.stat()
    file.close()
    assert after.st_ino == before.st_ino
    assert before.st_size < after.st_size < before.st_size + 5000
    (table,) = restored(path).store.pull(["table"])
    np.testing.assert_array_equal(table, np.arange(10_000)[:, None] < 3)


@pytest.mark.parametrize("copied_bytes", [0, 2**26])
def test_journal_that_has_grown_is_written_anew(path, written, monkeypatch, copied_bytes) -> None:
    monkeypatch.setattr(state_journal, "_SLACK_BYTES", 0)
    monkeypatch.setattr(state_journal, "_MOST_COPIED_BYTES", copied_bytes)
    state, journal = written
    sizes = []
    for seed in range(60):
        update(state, seed)
        done(state, "client", seed + 1)
        journal.write()
        sizes.append(path.stat().st_size)
        if seed % 10 == 9:
            assert_read(path, state)
    assert any(after < before for before, after in itertools.pairwise(sizes))
    assert max(sizes) < 3 * state.store.size_bytes
    assert os.listdir(path.parent) == ["journal"]


def test_journal_that_is_written_anew_while_rows_change_is_whole(
    path, written, monkeypatch
) -> None:
    monkeypatch.setattr(state_journal, "_MOST_COPIED_BYTES", 0)
    state, journal = written
    pieces = state.store.pieces

    def meanwhile(marks: Marks | None) -> Iterator:
        update(state, 1)
        yield from pieces(marks)
        update(state, 2)
        state.store.create(
            ShardSpec("new", (3, 2), "float32", has_rows=True), lambda: np.ones((3, 2))
        )

    monkeypatch.setattr(state.store, "pieces", meanwhile)
    assert journal.write() == 2
    assert_read(path, state)
    with Journal(path) as file:
        assert [message.kind for message in file.messages] == ["piece", "entry"]
    monkeypatch.undo()
    update(state, 3)  # its rows had been taken before
    journal.write()
    assert_read(path, state)


def most_rows_at_once(path: Path) -> dict[str, int]:
    """By kind of message, how many rows of the table the largest one has."""
    most: dict[str, int] = {}
    with Journal(path) as file:
        for one in file.messages:
            for part, rows in zip(one.fields["parts"], one.arrays, strict=False):
                if part["spec"]["name"] == "table":
                    most[one.kind] = max(len(rows), most.get(one.kind, 0))
    return most


def test_table_that_is_made_while_an_entry_waits_is_not_copied_at_once(path, monkeypatch) -> None:
    monkeypatch.setattr(state_journal, "_MOST_COPIED_BYTES", 0)
    monkeypatch.setattr(shards, "_PIECE_BYTES", 80)
    state, file = read(path)
    waits, changing = threading.Event(), state.store.changing

    def noted_changing() -> Any:
        waits.set()
        return changing()

    monkeypatch.setattr(state.store, "changing", noted_changing)
    with file:
        journal = StateJournal(file, state, 1e6)
        with changing():  # as the server holds it while it makes a variable
            writer = threading.Thread(target=journal.write)
            writer.start()
            assert waits.wait(120)
            spec = ShardSpec("table", (500, 2), "float32", has_rows=True)
            state.store.create(spec, lambda: np.ones((500, 2)))
        writer.join()
        assert most_rows_at_once(path) == {"piece": 10}


def test_slots_that_are_made_while_pieces_are_written_come_in_pieces_too(path, monkeypatch) -> None:
    monkeypatch.setattr(state_journal, "_MOST_COPIED_BYTES", 0)
    monkeypatch.setattr(shards, "_PIECE_BYTES", 80)
    state, file = read(path)
    spec = ShardSpec("table", (500, 2), "float32", has_rows=True)
    state.store.create(spec, lambda: np.arange(1000).reshape(500, 2))
    pieces = state.store.pieces

    def meanwhile(marks: Marks | None) -> Iterator:
        yield from pieces(marks)
        if marks is None:
            state.pushes.set_rule(RULE, ["table"], UpdateMode())

    monkeypatch.setattr(state.store, "pieces", meanwhile)
    with file:
        StateJournal(file, state, 1e6).write()
        assert most_rows_at_once(path) == {"piece": 10}
        names = ["table", "table:v"]
        after, wanted = (one.store.pull(names) for one in (restored(path), state))
        for one, other in zip(after, wanted, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("is_anew", [False, True])
def test_what_did_not_fit_on_the_disk_is_in_the_next_entry(
    path, written, monkeypatch, is_anew
) -> None:
    state, journal = written
    journal.write()
    update(state, 0)
    if is_anew:
        monkeypatch.setattr(state_journal, "_SLACK_BYTES", -(10**9))
    with full_disk(path.stat().st_size // 2 if is_anew else path.stat().st_size + 100):
        for seed in (1, 2):
            with pytest.raises(OSError, match="File too large"):
                journal.write()
            assert journal.error is not None
            assert "File too large" in journal.error
            assert journal.journaled_version == 0
            update(state, seed)
    monkeypatch.undo()
    assert os.listdir(path.parent) == ["journal"]
    assert journal.write() == 3
    assert journal.error is None
    assert_read(path, state)


def test_entries_are_each_of_one_moment_while_others_update(path, written) -> None:
    """The counter is in step with the values in every entry, of the rows, too."""
    state, journal = written
    store = state.store
    store.assign("table", np.zeros((500, 2)))
    store.assign("v", np.zeros((4, 3)))
    journal.write()
    is_over = threading.Event()

    def train() -> None:
        while not is_over.is_set():
            with store.changing():
                store.assign("v", np.ones((4, 3)), sign=1)
                store.scatter("table", np.arange(500), np.ones((500, 2)), sign=1)
                store.set_scalars({"count": store.scalars["count"] + 1})

    thread = threading.Thread(target=train)
    thread.start()
    try:
        counts = set()
        while len(counts) < 20:
            journal.write()
            after = restored(path)
            v, table = after.store.pull(["v", "table"])
            count = int(after.store.scalars["count"])
            counts.add(count)
            assert (v == count).all()
            assert (table == count).all()
    finally:
        is_over.set()
        thread.join()


def test_later_run_has_the_larger_number_whatever_the_clock_says(
    path, written, monkeypatch
) -> None:
    written[1].write()
    with Journal(path) as file:
        entry = file.messages[-1]
        entry.fields["lifetime"] = 2**62
        assert next_lifetime([entry]).number == 2**62 + 1
    clock = types.SimpleNamespace(time_ns=itertools.count(1).__next__)
    monkeypatch.setattr("stratagem.parameter_server.server.server.time", clock)
    first, second = next_lifetime([]), next_lifetime([])
    assert second.number > first.number
    assert first.restored_version is None
