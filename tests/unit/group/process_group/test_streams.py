"""Streams left early by this process, by another, or with an error."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from stratagem.errors import UnavailableError
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import joined, together

_LIMIT_S = 120.0
_LIMITS = GroupLimits(join_s=_LIMIT_S, peer_s=_LIMIT_S, stuck_s=600, barrier_s=_LIMIT_S)


@pytest.fixture
def members() -> Iterator[list[Group]]:
    groups = joined(3, _LIMITS)
    yield groups
    for group in groups:
        group.abandon()


class _Waiting:
    """A thread that calls a function, like one that reads ahead."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._result: list[Any] = []
        self._thread = threading.Thread(target=self._run, args=(function, *arguments))
        self._thread.start()

    def _run(self, function: Any, *arguments: Any) -> None:
        try:
            self._result.append(function(*arguments))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            self._result.append(error)

    def result(self) -> Any:
        """Returns the result or the exception."""
        self._thread.join(_LIMIT_S)
        assert self._result, "it still waits"
        return self._result[0]


def _hub_knows(members: list[Group]) -> tuple[int, int]:
    """Returns the numbers of open exchanges and of partly closed streams on process 0."""
    exchanges = members[0]._connection._hub._exchanges
    return len(exchanges._open), len(exchanges._left)


def test_values_of_all_come_back_as_long_as_all_are_there(members) -> None:
    streams = [member.stream("dataset 0 (1)") for member in members]
    received = together(3, lambda i: [streams[i].exchange((i, step)) for step in range(3)])
    assert received == [[[(0, step), (1, step), (2, step)] for step in range(3)]] * 3


def test_closing_wakes_the_thread_that_waits_and_ends_the_stream_for_good(members) -> None:
    stream = members[1].stream("dataset 0 (1)")
    waiting = _Waiting(stream.exchange, 4)
    stream.close()
    stream.close()
    assert waiting.result() is None
    assert stream.exchange(4) is None


def test_all_that_leave_early_go_on_together_and_nothing_is_kept(members) -> None:
    """Each reads ahead by a different number of batches when its program stops."""
    for epoch in range(3):
        streams = [member.stream(f"dataset 0 ({epoch})") for member in members]
        received = together(
            3, lambda i, streams=streams: [streams[i].exchange(i) for _ in range(2)]
        )
        assert received == [[[0, 1, 2]] * 2] * 3
        ahead = [_Waiting(streams[i].exchange, i) for i in range(2)]
        for stream in streams:
            stream.close()
        assert [one.result() for one in ahead] == [None, None]
        assert together(3, lambda i: members[i].exchange("after", i)) == [[0, 1, 2]] * 3
    # What was sent before an exchange has arrived before it was complete.
    assert _hub_knows(members) == (0, 0)
    for member in members:
        assert list(member._streams._open) == ["main"]
        assert member._main.answers == {}


@pytest.mark.parametrize("left_first", [False, True])
def test_process_that_needs_a_batch_of_a_closed_loop_gets_the_name_of_the_other(
    members, left_first, monkeypatch
) -> None:
    monkeypatch.setattr("stratagem.group.member._ERROR_REPORT_S", 0.05)
    streams = [member.stream("dataset 3 (1)") for member in members]
    together(3, lambda i: streams[i].exchange(i))
    if left_first:
        streams[1].close()
        waiting = _Waiting(streams[0].exchange, 0)
    else:
        waiting = _Waiting(streams[0].exchange, 0)
        streams[1].close()
    with pytest.raises(
        RuntimeError,
        match=r"worker 1 \(host1:1\) left the loop over dataset 3 \(1\), but "
        r"worker 0 \(host0:1\) needs batch 2",
    ):
        raise waiting.result()
    # The group itself goes on.
    assert together(3, lambda i: members[i].exchange("after", i)) == [[0, 1, 2]] * 3
    for stream in streams:
        stream.close()
    together(3, lambda i: members[i].exchange("end", i))
    assert _hub_knows(members) == (0, 0)


def test_one_that_leaves_a_loop_by_an_error_is_known_by_its_error(members) -> None:
    streams = [member.stream("dataset 0 (1)") for member in members]
    waiting = _Waiting(streams[0].exchange, 0)
    streams[2].close()
    members[2].report_error("Traceback: ValueError: a bug")
    error = waiting.result()
    assert isinstance(error, UnavailableError)
    assert "ValueError: a bug" in str(error)


def test_loop_left_here_too_needs_no_word_of_the_other(members) -> None:
    streams = [member.stream("dataset 0 (1)") for member in members]
    waiting = _Waiting(streams[0].exchange, 0)
    streams[2].close()
    streams[0].close()
    assert waiting.result() is None
