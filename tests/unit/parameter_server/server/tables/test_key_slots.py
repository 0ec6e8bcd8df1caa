"""Slots in use and free ones, and those that eviction chooses."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.parameter_server.server.tables import key_slots
from stratagem.parameter_server.server.tables.key_slots import KeySlots, SavedKeys
from stratagem.parameter_server.server.tables.policies import LeastFrequent, LeastRecent, NotSeenFor


def made(num_rows: int, most_rows: int = 100_000) -> KeySlots:
    slots = KeySlots(most_rows)
    slots.note(slots.add(np.arange(num_rows)), 1)
    return slots


def copied(slots: KeySlots, *marks: np.ndarray) -> KeySlots:
    """As a restart has it, from parts in a journal."""
    copy = KeySlots(100_000)
    for one in marks:
        copy.restore(SavedKeys.from_arrays(iter(slots.saved(one).arrays)))
    copy.restored()
    return copy


def assert_same(one: KeySlots, other: KeySlots) -> None:
    used = one.used
    assert used.tolist() == other.used.tolist()
    assert len(one) == len(other) == len(used)
    for array, its in (
        (one.counts, other.counts),
        (one.seen, other.seen),
        (one.index.keys, other.index.keys),
    ):
        np.testing.assert_array_equal(array[used], its[used])
    np.testing.assert_array_equal(other.find(one.index.keys[used]), used)


def test_free_slots_are_used_before_new_ones() -> None:
    slots = made(10)
    slots.remove(np.array([3, 7]))
    assert slots.find(np.array([2, 3, 7])).tolist() == [2, -1, -1]
    assert (len(slots), slots.num_slots) == (8, 10)
    again = slots.add(np.array([100, 101, 102]))
    assert sorted(again.tolist()) == [3, 7, 10]
    assert slots.counts[again].tolist() == slots.seen[again].tolist() == [0, 0, 0]
    assert slots.find(np.array([102, 101, 100])).tolist() == again[::-1].tolist()


def test_restored_slots_are_those_that_were_saved() -> None:
    slots = made(50)
    first = slots.dirty.take()
    assert first.tolist() == [*range(50)]
    before = slots.saved(first)
    slots.remove(np.arange(5, 20))
    slots.note(slots.add(np.array([7, 500])), 3)  # a key that was removed
    slots.note(np.array([0, 1]), 4, 2)
    second = slots.dirty.take()
    assert second.tolist() == [0, 1, *range(5, 20)]
    copy = KeySlots(100_000)
    copy.restore(before)
    copy.restore(slots.saved(second))
    copy.restored()
    assert_same(slots, copy)
    assert copy.counts[:2].tolist() == [3, 3]
    assert len(copy.add(np.arange(1000, 1013))) == 13
    assert copy.num_slots == 50
    # Parts written while a key moved to another slot: the later part has the final state.
    assert_same(slots, copied(slots, np.arange(50)))


def test_a_key_in_two_slots_is_refused() -> None:
    slots = made(3)
    saved = slots.saved(np.arange(3))
    saved.keys[2] = 0
    copy = KeySlots(10)
    copy.restore(saved)
    with pytest.raises(ValueError, match="two slots of a keyed table have the same key"):
        copy.restored()


@pytest.mark.parametrize(
    ("slots", "freed", "error"),
    [
        ([0, -1, 2], [], ValueError("a slot of a keyed table is negative")),
        ([0], [-5], ValueError("a slot of a keyed table is negative")),
        ([0, 10], [], MemoryError("A table needs memory for 11 rows")),
    ],
    ids=["negative", "freed", "large"],
)
def test_forged_slots_are_refused(slots, freed, error) -> None:
    numbers = np.array(slots)
    counts = np.ones(len(slots), np.uint32)
    saved = SavedKeys(numbers, numbers, counts, counts, np.array(freed, np.int64))
    with pytest.raises(type(error), match=str(error)):
        KeySlots(10).restore(saved)


def test_memory_is_that_of_the_arrays() -> None:
    slots = made(20_000)
    # A key, its count and version, two flags, and 5 bytes of a place in an index 0.4 to 0.8 full.
    assert 18 + 5 / 0.8 < slots.size_bytes / 20_000 < 18 + 5 / 0.38


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
        slots.remove(aged)
    assert sorted(gone) == [key for key in range(1000) if key != 5]
    assert min(gone.values()) == 81
    assert max(gone.values()) <= 91
    slots.note(slots.add(np.arange(1000, 1010)), 100)
    assert len(slots.aged(eviction, 500)) == 11  # as many as time has passed


def test_order_of_the_next_slots_comes_back() -> None:
    slots = made(20)
    slots.remove(np.array([7, 3, 11]))
    slots.aged(NotSeenFor(5), 9)
    copy = copied(slots, np.arange(20))
    copy.set_order(slots.order())
    assert copy.add(np.arange(100, 106)).tolist() == slots.add(np.arange(100, 106)).tolist()
    assert copy.order().swept == 9
    with pytest.raises(ValueError, match="the free slots of a keyed table are others"):
        copy.set_order(made(3).order())
    order = made(40).order()
    with pytest.raises(ValueError, match="the free slots of a keyed table are others"):
        copy.set_order(order)
