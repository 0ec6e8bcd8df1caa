"""Rows by key in a server's store: updates, their journal, and rows beyond a limit."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError, UnavailableError
from stratagem.parameter_server.server import server as state_journal
from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.server import ServerState, StateJournal
from stratagem.parameter_server.server.shards import ShardSpec, Slot, State
from stratagem.parameter_server.server.store import ServerVariables
from stratagem.parameter_server.server.tables.table_options import RowInitializer
from stratagem.parameter_server.server.tables.tiered_shard import TieredShard
from tests.unit.parameter_server.server.test_state_journal import read, restored
from tests.unit.parameter_server.server.update_rules import Momentum

UNIFORM: dict[str, Any] = {"kind": "uniform", "a": -1.0, "b": 1.0, "seed": 5}
DIM = 4
SECRET = 1_700_000_001
KEYS = np.array([2**40 + 5, -1, 0, -(2**63), 2**63 - 1])


class Accumulator(Momentum):
    """Momentum whose slot does not begin at 0."""

    initial = 0.25

    def slots(self, name: str, shape: tuple[int, ...], dtype: str) -> list[Slot]:
        assert shape == (0, DIM)
        return [Slot("v", dtype, self.initial)]


class Other(Accumulator):
    initial = 0.75


class Failing(Accumulator):
    def apply(self, state: State, grads: Mapping[str, np.ndarray]) -> State:
        raise FloatingPointError("no update")


def spec(name: str = "t", **options: Any) -> ShardSpec:
    table = {"initializer": UNIFORM, **options}
    return ShardSpec(name, (0, DIM), "float32", has_rows=True, table=table)


def made(rule: Momentum | None = None, **options: Any) -> ServerVariables:
    store = ServerVariables()
    assert store.create(spec(**options))
    store.set_rule(rule or Accumulator(), ["t"])
    return store


def initial(keys: np.ndarray) -> np.ndarray:
    return RowInitializer(**UNIFORM).rows(keys, (DIM,), np.dtype("float32"))


def push(store: ServerVariables, keys: np.ndarray, grads: np.ndarray | float = 1.0) -> None:
    full = np.broadcast_to(np.asarray(grads, np.float32), (len(keys), DIM))
    store.update({}, {"t": (keys, np.array(full))})


def test_a_pull_makes_no_row() -> None:
    store = made()
    np.testing.assert_array_equal(store.pull_rows("t", KEYS), initial(KEYS))
    np.testing.assert_array_equal(store.pull_rows("t:v", KEYS), np.full((5, DIM), 0.25))
    assert store.pull_rows("t", KEYS[:0]).shape == (0, DIM)
    push(store, KEYS[:1])
    np.testing.assert_array_equal(store.pull_rows("t", KEYS)[1:], initial(KEYS)[1:])
    assert store.tables["t"]["rows"] == 1
    whole, slot = store.pull(["t", "t:v"])  # of the shape that a Keras variable has
    assert whole.shape == slot.shape == (0, DIM)
    store.assign("t", whole)
    assert store.tables["t"]["rows"] == 1


def test_a_failed_update_changes_nothing() -> None:
    store = made(eviction={"kind": "LeastRecent"}, max_rows=3)
    push(store, np.array([1, 2, 3]))
    before, rows = store.tables, store.pull_rows("t", np.arange(6))
    store.set_rule(Failing("failing"), ["t"], "second")
    store.take_marks()
    with pytest.raises(FloatingPointError, match="no update"):
        store.update({}, {"t": (np.array([2, 4]), np.ones((2, DIM)))}, {"t": "second"})
    after = store.tables
    assert after["t"].pop("bytes") == before["t"].pop("bytes") + 3 * 4 * DIM  # the second slot
    assert after == before
    np.testing.assert_array_equal(store.pull_rows("t", np.arange(6)), rows)
    assert not store.take_marks()


def test_memory_that_is_missing_is_found_before_the_change(monkeypatch) -> None:
    store = made()
    push(store, np.arange(10))
    store.take_marks()
    before = store.tables
    slots = store._shards["t"]._slot_arrays["v"]

    def refuse(num_rows: int) -> None:
        raise MemoryError(f"no {num_rows} rows")

    with monkeypatch.context() as patch:
        patch.setattr(slots, "grow", refuse)
        with pytest.raises(MemoryError, match="no 9010 rows"):
            push(store, np.arange(100, 9100))
    assert store.tables == before
    assert not store.take_marks()
    push(store, np.arange(100, 9100))
    assert store.tables["t"]["rows"] == 9010


@pytest.mark.parametrize(
    ("keys", "error", "match"),
    [
        (np.array([SECRET], np.int32), TypeError, "keys of 't' are no int64 vector"),
        (np.array([[SECRET, 2]]), TypeError, "keys of 't' are no int64 vector"),
        (np.array([SECRET, 4, SECRET]), ValueError, "a key of 't' was given twice"),
    ],
    ids=["int32", "axes", "twice"],
)
def test_other_keys_gradients_and_specs_are_refused(keys, error, match) -> None:
    store = made()
    with pytest.raises(error, match=match) as raised:
        store.update({}, {"t": (keys, np.ones((len(keys), DIM)))})
    assert str(SECRET) not in str(raised.value)  # it may be the id of a person
    with pytest.raises(ValueError, match="a gradient of the whole of 't' was pushed"):
        store.update({"t": np.ones((0, DIM))}, {})
    with pytest.raises(TypeError, match="they have keys, and no numbers"):
        store.scatter("t", np.array([7]), np.ones((1, DIM), np.float32))
    with pytest.raises(ValueError, match="but it already exists"):
        store.create(spec(max_rows=5))
    assert not store.create(spec())
    assert ShardSpec.from_fields({**vars(spec())}) == spec()
    assert store.tables["t"]["rows"] == store.version == 0


@pytest.mark.parametrize("is_tiered", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_pulls_see_whole_rows_while_others_come_and_go(tmp_path, is_tiered) -> None:
    tiers = {"memory_bytes": 200 * 2 * 4 * DIM, "folder": str(tmp_path)}
    options = {"max_rows": 1500, "tiers": tiers} if is_tiered else {"max_rows": 500}
    store = made(eviction={"kind": "LeastRecent"}, **options)
    is_over = threading.Event()

    def pull() -> None:
        rng = np.random.default_rng(1)
        while not is_over.is_set():
            keys = rng.integers(0, 3000, 200)
            moved = store.pull_rows("t", keys) - initial(keys)  # the same for all columns
            np.testing.assert_allclose(moved, moved[:, :1] * np.ones(DIM), atol=1e-5)

    with ThreadPoolExecutor(2) as threads:
        pulls = [threads.submit(pull) for _ in range(2)]
        rng = np.random.default_rng(2)
        try:
            for _ in range(150):
                keys = np.unique(rng.integers(0, 3000, 100 if is_tiered else 300))
                store.tiers.warm({"t": (keys, keys)})
                push(store, keys)
        finally:
            is_over.set()
        for one in pulls:
            one.result()
    table = store.tables["t"]
    assert table["evicted"] > (100 if is_tiered else 1000)
    assert table.get("disk_reads", 0) > 1000 or not is_tiered


OPTIONS = {
    "admission": {"kind": "AfterSightings", "sightings": 2, "max_candidates": 300},
    "eviction": {"kind": "LeastFrequent"},
    "max_rows": 120,
}
RULE = Accumulator()


@pytest.fixture
def started(tmp_path) -> Iterator[Callable[..., tuple[ServerState, StateJournal]]]:
    """Starts a state with a table, and its journal."""
    with contextlib.ExitStack() as stack:

        def start(**options: Any) -> tuple[ServerState, StateJournal]:
            state, journal = read(tmp_path / "journal")
            stack.callback(journal.close)
            state.store.create(spec(**options))
            state.pushes.set_rule(RULE, ["t"])
            return state, StateJournal(journal, state, 1e6)

        yield start


def update(state: ServerState, step: int) -> None:
    rng = np.random.default_rng(step)
    keys = np.unique(rng.zipf(1.3, 80) % 400 - 100)
    push(state.store, keys, rng.normal(size=(len(keys), DIM)))


def assert_restored(path: Path, wanted: ServerState) -> ServerState:
    state = restored(path)
    keys = np.arange(-110, 310)
    for name in ("t", "t:v"):
        np.testing.assert_array_equal(
            state.store.pull_rows(name, keys), wanted.store.pull_rows(name, keys)
        )
    sizes = [{**one.store.tables["t"]} for one in (state, wanted)]
    for one in sizes:
        del one["bytes"]  # a freed slot at the end, and the places in the index
    assert sizes[0] == sizes[1]
    return state


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["all", "policies"])
def test_state_is_the_same_after_a_restart(tmp_path, started, options) -> None:
    state, journal = started(**options)
    journal.write()
    assert_restored(tmp_path / "journal", state)  # a table without rows
    for step in range(40):
        update(state, step)
        if step % 3 == 0:
            journal.write()
            assert_restored(tmp_path / "journal", state)
    assert state.store.tables["t"]["evicted"] > 0 or not options
    # Training continues as it would have.
    journal.write()
    after = assert_restored(tmp_path / "journal", state)
    after.pushes.set_rule(RULE, ["t"])
    for step in range(100, 110):
        for one in (state, after):
            update(one, step)
    keys = np.arange(-110, 310)
    got, wanted = after.store, state.store
    np.testing.assert_array_equal(got.pull_rows("t", keys), wanted.pull_rows("t", keys))
    assert got.tables["t"]["evicted_updates"] == wanted.tables["t"]["evicted_updates"]


def test_an_entry_has_the_changed_rows_alone(tmp_path, started) -> None:
    state, journal = started()
    push(state.store, np.arange(20_000))
    journal.write()
    sizes: list[int] = []
    for keys in (np.arange(10), np.array([5]), np.arange(30_000, 30_010)):
        before = journal._journal.size_bytes
        push(state.store, keys)
        journal.write()
        sizes.append(journal._journal.size_bytes - before)
    assert max(sizes) < 4000
    assert_restored(tmp_path / "journal", state)


def test_refusals_alone_are_in_the_journal(tmp_path, started) -> None:
    state, journal = started(max_rows=5)
    for keys in (np.arange(5), np.arange(10, 14)):  # then to a full table
        push(state.store, keys)
        journal.write()
    after = assert_restored(tmp_path / "journal", state)
    assert after.store.tables["t"]["refused_updates"] == 4


@pytest.mark.slow
def test_journal_is_written_anew_while_rows_come_and_go(tmp_path, started, monkeypatch) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", 1000)
    monkeypatch.setattr(state_journal, "_SLACK_BYTES", 0)
    monkeypatch.setattr(state_journal, "_MOST_TIMES", 0)
    state, journal = started(**OPTIONS)
    for step in range(20):
        update(state, step)
    step = 100
    pieces = state.store.pieces

    def changing(marks: Any = None) -> Any:
        nonlocal step
        for piece in pieces(marks):
            yield piece
            update(state, step)  # a key may be in two pieces, at other slots
            step += 1

    monkeypatch.setattr(state.store, "pieces", changing)
    num_steps = step
    for _ in range(30):
        update(state, step)
        journal.write()
        assert_restored(tmp_path / "journal", state)
    assert step > num_steps + 10


def test_marks_of_a_failed_write_are_put_back(tmp_path, started, monkeypatch) -> None:
    state, journal = started(**OPTIONS)
    journal.write()

    def fail(message: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(journal._journal, "append", fail)
        for step in range(10):
            update(state, step)
            with pytest.raises(OSError, match="disk full"):
                journal.write()
    journal.write()
    assert_restored(tmp_path / "journal", state)


# Rows beyond a memory limit: the values are those of a table that is in memory.


LIMIT_ROWS = 64
ROW_BYTES = 4 * DIM
ALL_KEYS = np.arange(-120, 420)


def tiers(folder: Path, num_rows: int = LIMIT_ROWS, num_arrays: int = 2) -> dict[str, Any]:
    return {"tiers": {"memory_bytes": num_rows * num_arrays * ROW_BYTES, "folder": str(folder)}}


def shard_of(store: ServerVariables) -> TieredShard:
    shard = store._shards["t"]
    assert isinstance(shard, TieredShard)
    return shard


def train(store: ServerVariables, step: int, optimizer: str = "", *, warms: bool = True) -> None:
    """As a server does, which reads rows from disk before the change."""
    rng = np.random.default_rng(step)
    keys = rng.permutation(np.unique(rng.zipf(1.2, 60) % 400 - 100))
    grads = rng.normal(size=(len(keys), DIM)).astype(np.float32)
    if warms:
        store.tiers.warm({"t": (keys, grads)})
    store.update({}, {"t": (keys, grads)}, {"t": optimizer})


def assert_same(got: ServerVariables, wanted: ServerVariables, *names: str) -> None:
    for name in ("t", "t:v", *names):
        np.testing.assert_array_equal(
            got.pull_rows(name, ALL_KEYS), wanted.pull_rows(name, ALL_KEYS)
        )
    for name, count in wanted.tables["t"].items():
        if name not in ("bytes", "hot"):
            assert got.tables["t"][name] == count


def change(store: ServerVariables, step: int) -> None:
    """One of the changes that a server makes, drawn by the step."""
    rng = np.random.default_rng(step)
    keys = rng.permutation(rng.choice(ALL_KEYS, rng.choice([3, 30, 300]), replace=False))
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


def test_new_table_begins_without_the_rows_of_an_earlier_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    store = made(**tiers(tmp_path, 8))
    with pytest.raises(UnavailableError, match="is in use by process"):
        made(**tiers(tmp_path))
    for _ in range(3):
        push(store, np.arange(100))
        store.tiers.save()
    store.tiers.close()
    store = made(**tiers(tmp_path, 8))
    np.testing.assert_array_equal(store.pull_rows("t", ALL_KEYS), initial(ALL_KEYS))
    store.tiers.close(removes=True)
    assert not list(tmp_path.glob("*"))
