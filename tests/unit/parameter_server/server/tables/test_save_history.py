"""Changed slots since each save, against sets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.parameter_server.server.tables import save_history
from stratagem.parameter_server.server.tables.key_slots import KeySlots
from stratagem.parameter_server.server.tables.save_history import SaveHistory

NUM_SLOTS = 40
SLOTS = st.sets(st.integers(0, NUM_SLOTS - 1), max_size=6)
OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["change", "take", "save"]), SLOTS, st.integers(0, 4)), max_size=60
)


def slots_in_use() -> KeySlots:
    slots = KeySlots(100)
    slots.add(np.arange(NUM_SLOTS))
    return slots


@given(OPERATIONS)
@settings(deadline=None)
def test_changes_since_a_save_are_those_of_sets(operations) -> None:
    rows, candidates = slots_in_use(), slots_in_use()
    history = SaveHistory(rows, candidates)
    history.take()
    since: dict[str, tuple[set[int], set[int]]] = {}
    for number, (name, slots, base) in enumerate(operations):
        if name == "change":
            rows.mark(np.array([*slots], np.int64))
            candidates.mark(np.array([one // 2 for one in slots if one % 2], np.int64))
            for own, others in since.values():
                own |= slots
                others |= {one // 2 for one in slots if one % 2}
        else:
            history.take()
        if name == "save":
            save = str(number)
            history.add(save, str(base))
            since[save] = set(), set()
        if name != "change":
            since = {save: changes for save, changes in since.items() if save in history}
            for save, (own, others) in since.items():
                assert {*history.since(save).rows.tolist()} == own
                assert {*history.since(save).candidates.tolist()} == others
    assert len(since) <= 8


def test_saves_of_another_folder_stay() -> None:
    rows = slots_in_use()
    history = SaveHistory(rows, KeySlots(100))
    history.take()
    history.add("hourly")
    for number in range(50):  # each continues the last one
        rows.mark(np.array([number % NUM_SLOTS]))
        history.take()
        history.add(f"minute {number}", f"minute {number - 1}")
    assert "hourly" in history
    assert "minute 49" in history
    assert "minute 40" not in history
    assert len(history.since("hourly").rows) == NUM_SLOTS
    assert history.since("minute 48").rows.tolist() == [9]


def test_table_that_changes_as_a_whole_forgets_its_first_saves(monkeypatch) -> None:
    monkeypatch.setattr(save_history, "_LEAST_SLOTS", 0)
    rows = slots_in_use()
    history = SaveHistory(rows, KeySlots(100))
    for save in ("a", "b", "c"):
        rows.mark(np.arange(NUM_SLOTS))
        history.take()
        history.add(save)
    assert [save in history for save in ("a", "b", "c")] == [False, True, True]


def test_table_that_is_not_saved_has_no_cost() -> None:
    rows = slots_in_use()
    history = SaveHistory(rows, KeySlots(100))
    before = rows.unsaved
    assert before is None
    history.take()
    assert rows.unsaved is not None
    rows.mark(np.arange(3))
    assert history.num_unsaved == 3


@pytest.mark.parametrize("save", ["x", 3])
def test_unknown_save(save) -> None:
    assert save not in SaveHistory(slots_in_use(), slots_in_use())
