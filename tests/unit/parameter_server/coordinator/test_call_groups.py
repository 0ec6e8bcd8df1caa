"""Messages of several calls, and how many travel together."""

from __future__ import annotations

import math

import numpy as np
import pytest

from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.parameter_server.coordinator.shipping import (
    Ended,
    RecentDuration,
    SentCall,
    calls_in,
    ended_in,
    pack_calls,
    pack_ended,
)


def sent(message: Message) -> Message:
    """The message on the other side."""
    return unpack([bytes(frame) for frame in pack(message)])


@pytest.mark.parametrize("packed", [[b"a"], [b"first", b"", b"x" * 100_000]])
def test_calls_arrive_in_their_order(packed) -> None:
    calls = [SentCall(7, 20 + i, i % 2 == 0, one) for i, one in enumerate(packed)]
    message = sent(pack_calls(calls, {"order": 3}))
    assert message.fields["order"] == 3
    assert [
        SentCall(one.function, one.closure, one.is_rerun, bytes(one.packed))
        for one in calls_in(message)
    ] == calls


def test_outcomes_arrive_with_the_counts_of_their_calls() -> None:
    ended = [
        Ended(b"result", 0.25, {4: np.float32([1, 2]), 9: np.float32(3)}),
        Ended(b"no counts", 3e-6),
        Ended(b"result", 0.0, {9: np.float32(5)}),
        Ended(b"error", trace="Traceback"),
    ]
    got = list(ended_in(sent(pack_ended(ended, {"losses": {}}))))
    assert [bytes(one.packed) for one in got] == [b"result", b"no counts", b"result", b"error"]
    assert [one.duration_s for one in got] == [0.25, 3e-6, 0.0, 0.0]
    assert [one.trace for one in got] == [None, None, None, "Traceback"]
    assert [list(one.counted) for one in got] == [[4, 9], [], [9], []]
    np.testing.assert_array_equal(got[0].counted[4], [1, 2])
    assert got[2].counted[9] == 5


def test_duration_is_that_of_the_longest_call_for_a_while() -> None:
    duration = RecentDuration()
    assert duration.expected_s == math.inf
    duration.note(1.0)
    duration.note(2.0)
    assert duration.expected_s == 2.0
    duration.note(1e-6)
    assert duration.expected_s == pytest.approx(1.8)
    for _ in range(200):
        duration.note(1e-6)
    assert duration.expected_s == 1e-6
