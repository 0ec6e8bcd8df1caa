"""Warnings of updates that were lost with servers."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.client.lost_updates import LostUpdates


def test_each_new_number_is_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note({})
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 1 update was lost in all"):
        lost.note({"0/10/push": 1})
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 2 updates were lost"):
        lost.note({"0/10/push": 1, "0/10/assign_add": 1})
    lost.note({"0/10/push": 1, "0/10/assign_add": 1})
    with pytest.warns(
        RuntimeWarning, match=r"5 updates were lost in all \(assign_add: 1, push: 4\)"
    ):
        lost.note({"0/10/push": 2, "1/30/push": 2})
    lost.note({"0/10/push": 1, "0/10/assign_add": 1})  # of an answer that came late
    assert lost.losses == {"0/10/push": 2, "1/30/push": 2, "0/10/assign_add": 1}


def test_repeated_updates_are_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note_repeated(0)
    with pytest.warns(RuntimeWarning, match=r"ran again on worker 3.* 2 of its updates had been"):
        lost.note_repeated(2)
    lost.note_repeated(5)
    lost.note_repeated(0)  # in another process
    assert lost.num_repeated == 5
