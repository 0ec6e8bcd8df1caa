"""Warnings of updates that were lost with servers."""

from __future__ import annotations

import pytest

from stratagem.parameter_server.client.lost_updates import LostUpdates


def test_each_new_number_is_reported_once() -> None:
    lost = LostUpdates(3)
    lost.note(0)
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 1 update was lost in all"):
        lost.note(1)
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 2 updates were lost"):
        lost.note(2)
    lost.note(2)
    with pytest.warns(RuntimeWarning, match="worker 3 has seen that 5 updates were lost"):
        lost.note(5)
    lost.note(4)  # of an answer that came late
    assert lost.count == 5
