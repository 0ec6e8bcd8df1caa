"""Files of tables: what was written, in place, and each kind of damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.errors import DataLossError
from stratagem.parameter_server.server.shards import ShardSpec, Slot
from stratagem.parameter_server.server.tables import key_slots, keyed_shard
from stratagem.parameter_server.server.tables.key_slots import KeySlots, SavedKeys, SlotOrder
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard
from stratagem.parameter_server.server.tables.saved_tables import (
    SavedRows,
    TableEnd,
    TableFile,
    TableFileWriter,
    TableHead,
)
from stratagem.parameter_server.server.tables.table_chains import TableChain
from stratagem.parameter_server.server.tables.table_options import (
    AfterSightings,
    LeastFrequent,
    LeastRecent,
    NotSeenFor,
    WithProbability,
    are_drawn,
    victims,
)
from tests.unit.parameter_server.server.tables.scalar_hash import (
    GOLDEN,
    KEYS,
    MASK,
    mixed,
    seeded_key,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NONE = SavedKeys(*(np.empty(0, dtype) for dtype in (int, int, "u4", "u4", int)))
HEAD = TableHead("save 1", None, "a/b", 2, (3, 5), "bfloat16")


def keys_of(slots: list[int], freed: tuple[int, ...] = ()) -> SavedKeys:
    numbers = np.array(slots, np.int64)
    return SavedKeys(
        numbers,
        numbers * 7 - 2**62,
        (numbers + 1).astype(np.uint32),
        (numbers + 2).astype(np.uint32),
        np.array(freed, np.int64),
    )


def rows_of(slots: list[int], freed: tuple[int, ...] = (), scale: int = 1) -> SavedRows:
    keys = keys_of(slots, freed)
    value = np.arange(len(slots) * 15).reshape(-1, 3, 5).astype(BFLOAT16) + scale
    slot = np.arange(len(slots) * 15, dtype=np.float32).reshape(-1, 3, 5) * scale
    return SavedRows(keys, NONE, value, {"adam.v": slot})


def end_of(num_slots: int, free: tuple[int, ...] = ()) -> TableEnd:
    order = SlotOrder(num_slots, 4, None, np.array(free, np.int32))
    return TableEnd(9, order, SlotOrder(0, 0, 3, order.free[:0]), {"created": 1}, {"adam.v": 0.5})


def write(path: Path, parts: list[SavedRows], head: TableHead = HEAD, num_slots: int = 3000) -> int:
    with TableFileWriter(path, head) as writer:
        for part in parts:
            writer.add(part)
        return writer.end(end_of(num_slots, (2, 1)))


def assert_same(part: SavedRows, wanted: SavedRows) -> None:
    for one, other in ((part.rows, wanted.rows), (part.candidates, wanted.candidates)):
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    np.testing.assert_array_equal(part.value, wanted.value)
    assert part.value.dtype == BFLOAT16
    np.testing.assert_array_equal(part.slots["adam.v"], wanted.slots["adam.v"])


def test_file_has_what_was_written(tmp_path) -> None:
    path = tmp_path / "rows"
    parts = [rows_of([0, 5]), rows_of([7, *range(50, 2000)], (3, 4), 2), rows_of([], (1,))]
    size_bytes = write(path, [*parts, rows_of([])])
    assert path.stat().st_size == size_bytes
    assert [one.name for one in tmp_path.iterdir()] == ["rows"]
    with TableFile(path, size_bytes) as file:
        assert (file.head, file.end.version, file.end.initials) == (HEAD, 9, {"adam.v": 0.5})
        assert (file.end.rows.num_slots, file.end.rows.free.tolist()) == (3000, [2, 1])
        assert (file.end.candidates.swept, file.end.counters) == (3, {"created": 1})
        found = [*file.parts()]
        assert len(found) == 3
        for part, wanted in zip(found, parts, strict=True):
            assert_same(part, wanted)
            # a mapped file is an array of rows
            assert part.offset % HEAD.row_bytes == 0
            rows = np.frombuffer(file.map, f"V{HEAD.row_bytes}", len(file.map) // HEAD.row_bytes)
            first = part.offset // HEAD.row_bytes
            own = rows[first : first + len(part.value)].view(BFLOAT16).reshape(part.value.shape)
            np.testing.assert_array_equal(own, part.value)
        for part, wanted in zip(file.parts(is_reversed=True), reversed(parts), strict=True):
            assert_same(part, wanted)


def test_each_changed_or_missing_byte_and_record_is_found(tmp_path) -> None:
    path = tmp_path / "rows"
    size_bytes = write(path, [rows_of([0, 1])], num_slots=2)
    data = path.read_bytes()
    for place in range(0, size_bytes, 3):
        changed = bytearray(data)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(DataLossError, match="rows cannot be read: "):
            TableFile(path)
    for length in range(0, size_bytes, 7):
        path.write_bytes(data[:length])
        with pytest.raises(DataLossError, match=f"it has {length} bytes and not {size_bytes}"):
            TableFile(path, size_bytes)
        with pytest.raises(DataLossError, match="rows cannot be read: "):
            TableFile(path)
    path.write_bytes(b"stratagem table 9\n" + data[18:])
    with pytest.raises(DataLossError, match="it is not a saved table of this format"):
        TableFile(path)
    path.write_bytes(data[:18] + data[18:] + data[18:])  # records in a wrong order, or none
    with pytest.raises(DataLossError, match="invalid contents"):
        [*TableFile(path).parts()]
    path.write_bytes(data[:18])
    with pytest.raises(DataLossError, match="invalid contents"):
        TableFile(path)
    path.unlink()
    with pytest.raises(DataLossError, match="rows cannot be read: it is missing"):
        TableFile(path)


def test_writer_that_fails_leaves_nothing(tmp_path) -> None:
    damaged = dataclasses.replace(rows_of([0]), slots={"adam.v": np.array([None])})
    with TableFileWriter(tmp_path / "rows", HEAD) as writer:
        writer.add(rows_of([0]))
        with pytest.raises(TypeError, match="references"):
            writer.add(damaged)
    assert not [*tmp_path.iterdir()]


def test_chain_has_each_slot_once(tmp_path) -> None:
    changes = dataclasses.replace(HEAD, save="save 2", base="save 1")
    first = write(tmp_path / "1", [rows_of([*range(10)]), rows_of([2, 3], (9,), 5)])
    second = write(tmp_path / "2", [rows_of([3, 11], (0,), 7), rows_of([4], (11,), 8)], changes)
    files = [("2", second, "save 2"), ("1", first, "save 1")]
    with TableChain(tmp_path, {"files": files, "buckets": [5, 2]}) as chain:
        found: dict[int, float] = {}
        for _, part in chain.rows():
            for slot, row in zip(part.rows.slots.tolist(), part.value[:, 0, 0], strict=True):
                assert slot not in found
                found[slot] = float(row)
        assert found == {4: 8, 3: 7, 2: 5, 1: 16, **{slot: 15 * slot + 1 for slot in range(5, 9)}}
        assert chain.buckets == range(5, 7)
        assert chain.end.version == 9


def test_chain_out_of_order(tmp_path) -> None:
    changes = dataclasses.replace(HEAD, save="save 2", base="save 1")
    sizes = write(tmp_path / "1", [rows_of([0])]), write(tmp_path / "2", [rows_of([1])], changes)
    one, two = ("1", sizes[0], "save 1"), ("2", sizes[1], "save 2")
    for files, damaged in (
        ([two], "2"),  # a full version is missing
        ([one, two], "2"),
        ([("1", sizes[0], "save 2"), one], "1"),
        ([two, ("1", sizes[0], "save 0")], "1"),
        ([two, ("3", sizes[0], "save 1")], "3"),
    ):
        with pytest.raises(DataLossError, match=f"The saved table {tmp_path}/{damaged} cannot"):
            TableChain(tmp_path, {"files": files, "buckets": [0, 1]})
    with pytest.raises(DataLossError, match="does not continue this one"):
        TableChain(tmp_path, {"files": [two, two], "buckets": [0, 1]})
    with pytest.raises(DataLossError, match="changes of another version, which is not there"):
        TableChain(tmp_path, {"files": [two], "buckets": [0, 1]})


# Slots in use and free ones, and those that eviction chooses.


def made(num_rows: int, most_rows: int = 100_000) -> KeySlots:
    slots = KeySlots(most_rows)
    slots.note(slots.add(np.arange(num_rows)), 1)
    return slots


def test_forged_slots_are_refused() -> None:
    slots = made(3)
    saved = slots.saved(np.arange(3))
    saved.keys[2] = 0
    copy = KeySlots(10)
    copy.restore(saved)
    with pytest.raises(ValueError, match="two slots of a keyed table have the same key"):
        copy.restored()
    for own, freed, error in (
        ([0, -1, 2], [], ValueError("a slot of a keyed table is negative")),
        ([0], [-5], ValueError("a slot of a keyed table is negative")),
        ([0, 10], [], MemoryError("A table needs memory for 11 rows")),
    ):
        numbers, counts = np.array(own), np.ones(len(own), np.uint32)
        saved = SavedKeys(numbers, numbers, counts, counts, np.array(freed, np.int64))
        with pytest.raises(type(error), match=str(error)):
            KeySlots(10).restore(saved)


@pytest.mark.parametrize("eviction", [LeastRecent(), LeastFrequent()])
def test_large_table_evicts_the_first_of_a_window(monkeypatch, eviction) -> None:
    monkeypatch.setattr(key_slots, "_WINDOW", 128)
    slots = KeySlots(1000)
    rng = np.random.default_rng(0)
    slots.add(np.arange(1000))
    slots.note(rng.permutation(1000)[:500], 5)
    chosen = [slots.chosen(eviction, 1) for _ in range(8)]
    for window, one in enumerate(chosen):
        inside = np.arange(128 * window, 128 * window + 128) % 1000
        assert len(one) == 2  # 1/64 of the window
        assert np.isin(one, inside).all()
        assert (slots.seen[one] == 0).all()
    assert len(slots) == 1000


def test_all_windows_are_searched_if_most_slots_are_held(monkeypatch) -> None:
    monkeypatch.setattr(key_slots, "_WINDOW", 16)
    monkeypatch.setattr(key_slots, "_WINDOW_PER_VICTIM", 1)
    slots = made(100)
    with slots.held(np.arange(90)):
        assert sorted(slots.chosen(LeastRecent(), 10).tolist()) == [*range(90, 100)]
    assert len(slots.used) == 100
    with pytest.raises(ZeroDivisionError), slots.held(np.arange(90)):
        raise ZeroDivisionError
    assert len(slots.used) == 100
    assert len(KeySlots(10).chosen(LeastRecent(), 1)) == 0


def test_rows_are_evicted_between_their_age_and_an_eighth_more(monkeypatch) -> None:
    monkeypatch.setattr(key_slots, "_LEAST_LOOKED_AT", 1)
    slots, eviction = made(1000), NotSeenFor(80)
    gone: dict[int, int] = {}
    for version in range(2, 100):
        slots.note(np.array([5]), version)
        aged = slots.aged(eviction, version)
        gone.update(dict.fromkeys(aged.tolist(), version))
        slots.remove(aged, version)
    assert sorted(gone) == [key for key in range(1000) if key != 5]
    assert min(gone.values()) == 81
    assert max(gone.values()) <= 91
    slots.note(slots.add(np.arange(1000, 1010)), 100)
    assert len(slots.aged(eviction, 500)) == 11  # as many as time has passed


def test_order_of_the_next_slots_comes_back() -> None:
    slots = made(20)
    slots.remove(np.array([7, 3, 11]), 1)
    slots.aged(NotSeenFor(5), 9)
    copy = KeySlots(100_000)  # as a restart has it, from a journal
    copy.restore(SavedKeys.from_arrays(iter(slots.saved(np.arange(20)).arrays)))
    copy.restored()
    copy.set_order(slots.order())
    assert copy.add(np.arange(100, 106)).tolist() == slots.add(np.arange(100, 106)).tolist()
    assert copy.order().swept == 9
    for count in (3, 40):
        order = made(count).order()
        with pytest.raises(ValueError, match="the free slots of a keyed table are others"):
            copy.set_order(order)


# Changed slots since each save, against sets.

SLOTS = st.sets(st.integers(0, 39), max_size=6)
OPERATIONS = st.lists(st.tuples(st.sampled_from(["update", "evict", "save"]), SLOTS), max_size=60)


@given(OPERATIONS)
@settings(deadline=None)
def test_changes_since_a_save_are_those_of_sets(operations) -> None:
    """Slots that were freed before a save are not among them: there may be millions."""
    slots, version = KeySlots(100), 0
    slots.add(np.arange(40))
    since: dict[int, set[int]] = {}
    for name, numbers in operations:
        used = np.intersect1d(np.array([*numbers], np.int64), slots.used)
        if name == "save":
            since[version] = set()
        else:
            version += 1
            change = slots.note if name == "update" else slots.remove
            change(used, version)
            for changed in since.values():
                changed |= {*used.tolist()}
        for saved, changed in since.items():
            assert {*slots.changed(saved).tolist()} == changed


def test_a_table_remembers_its_last_saves(monkeypatch) -> None:
    monkeypatch.setattr(keyed_shard, "_MOST_SAVES", 2)
    spec = ShardSpec("t", (0, 2), "float32", has_rows=True, table={})
    shard = KeyedShard(spec)
    for version, save in enumerate("abca"):
        shard.note_save(save, version)
    assert shard.saves == {"c": 2, "a": 3}
    shard.add_slot("v", Slot("v", "float32", 0.0))
    shard.drop_slot("v")  # rows of these saves may have it
    assert not shard.saves


# Decisions of policies.


def test_counts_of_four_billion_do_not_overflow() -> None:
    counts, seen = np.array([2**32 - 1, 5], np.uint32), np.array([0, 2**32 - 1], np.uint32)
    assert victims(LeastFrequent(), counts, seen, np.ones(2, np.bool_), 1).tolist() == [1]
    assert victims(LeastRecent(), counts, seen, np.ones(2, np.bool_), 1).tolist() == [0]


def test_rows_are_admitted_with_their_probability() -> None:
    policy, keys = WithProbability(0.1, seed=3), np.arange(10_000)
    shares = [are_drawn(policy, keys, version).mean() for version in range(10)]
    assert abs(np.mean(shares) - 0.1) < 6 * (0.09 / 100_000) ** 0.5
    both = are_drawn(policy, keys, 1) & are_drawn(policy, keys, 2)  # independent
    assert abs(both.mean() - 0.01) < 6 * (0.01 / 10_000) ** 0.5
    assert are_drawn(WithProbability(1.0), keys, 7).all()
    for version in (0, 1, 2**40):
        wanted = [
            (mixed((seeded_key(key, 3) + version * GOLDEN) & MASK) >> 11) / 2**53 < 0.1
            for key in KEYS
        ]
        assert are_drawn(policy, np.array(KEYS), version).tolist() == wanted


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (AfterSightings, (0,)),
        (AfterSightings, (2, 0)),
        (WithProbability, (0.0,)),
        (WithProbability, (1.5,)),
        (NotSeenFor, (0,)),
    ],
)
def test_numbers_out_of_range_are_refused(kind, numbers) -> None:
    with pytest.raises(ValueError, match=r"received \w+=[0-9.]+"):
        kind(*numbers)
