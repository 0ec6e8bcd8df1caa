"""The choice of participants: by a table of notices, and over connections."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from stratagem.group.elastic.backed_rounds import Arrivals, ArrivalsThread, RoundChoice
from stratagem.group.elastic.peer_connections import PeerLostError


def _choice(num_needed: int = 2, max_behind: int = 3, **passed: int) -> RoundChoice:
    all_passed = dict.fromkeys(range(3), 10) | {int(key[1:]): one for key, one in passed.items()}
    return RoundChoice(range(3), num_needed, all_passed, max_behind)


def test_the_first_ones_take_part_in_the_order_of_members() -> None:
    choice = _choice()
    choice.arrive(2, 11, 0.0)
    assert choice.choose(5.0) is None
    choice.arrive(1, 11, 5.0)
    chosen = choice.choose(5.0)
    assert chosen is not None
    assert (chosen.number, chosen.participants, chosen.passed_by_all) == (11, (1, 2), 10)
    assert choice.choose(5.0) is None
    choice.arrive(0, 11, 5.1)  # too late: it receives this round, and may arrive at the next
    assert choice.choose(6.0) is None
    choice.arrive(1, 12, 6.0)
    choice.arrive(0, 12, 6.1)
    chosen = choice.choose(6.3)
    assert chosen is not None
    assert (chosen.number, chosen.participants) == (12, (0, 1))


def test_all_take_part_if_all_are_there() -> None:
    choice = _choice()
    for member in (1, 0, 2):
        choice.arrive(member, 11, 0.0)
    chosen = choice.choose(0.0)
    assert chosen is not None
    assert chosen.participants == (0, 1, 2)


def test_one_that_comes_soon_after_is_waited_for() -> None:
    choice = _choice()
    for member in (0, 1, 2):
        choice.arrive(member, 11, 0.0)
    assert choice.choose(0.0) is not None
    choice.arrive(0, 12, 9.0)
    choice.arrive(1, 12, 10.0)  # a round takes 10 s: one that comes within 1 s takes part
    assert choice.choose(10.9) is None
    assert choice.wait_s(10.5) == pytest.approx(0.5)
    choice.arrive(2, 12, 10.9)
    chosen = choice.choose(10.9)
    assert chosen is not None
    assert chosen.participants == (0, 1, 2)
    choice.arrive(0, 13, 20.0)
    choice.arrive(1, 13, 20.0)
    assert choice.choose(20.8) is None
    chosen = choice.choose(21.1)
    assert chosen is not None
    assert chosen.participants == (0, 1)


def test_one_that_is_too_far_behind_is_waited_for() -> None:
    choice = _choice(max_behind=2, _2=10)
    for number in (11, 12):
        choice.arrive(0, number, float(number))
        choice.arrive(1, number, float(number))
        assert choice.choose(number + 1.0) is not None
    choice.arrive(0, 13, 13.0)
    choice.arrive(1, 13, 13.0)
    assert choice.choose(100.0) is None
    assert not choice.has_passed(11)
    choice.note_passed(2, 11)
    chosen = choice.choose(100.0)
    assert chosen is not None
    assert (chosen.participants, chosen.passed_by_all) == ((0, 1), 11)


def test_one_that_begins_behind_the_others_is_no_participant() -> None:
    choice = _choice(_2=8)
    choice.arrive(0, 11, 0.0)
    choice.arrive(2, 9, 0.0)  # a round that the others have made
    assert choice.choose(1.0) is None
    choice.arrive(1, 11, 1.0)
    chosen = choice.choose(2.0)
    assert chosen is not None
    assert (chosen.participants, chosen.passed_by_all) == ((0, 1), 8)


def _never(waited_s: float) -> None:
    assert waited_s < 120


@contextlib.contextmanager
def _connected() -> Iterator[tuple[ArrivalsThread, list[Arrivals]]]:
    pairs = [socket.socketpair() for _ in range(3)]
    thread = ArrivalsThread(
        range(3), {member: pair[0] for member, pair in enumerate(pairs)}, _choice()
    )
    arrivals = [Arrivals(range(3), pair[1]) for pair in pairs]
    try:
        yield thread, arrivals
    finally:
        thread.close()
        for one in arrivals:
            one.close()


def test_all_hear_who_takes_part() -> None:
    with _connected() as (_, arrivals):
        arrivals[2]._notify(1, 11)
        assert arrivals[0].chosen(11) is None
        assert arrivals[1].arrive(11, _never) == (1, 2)
        assert arrivals[0].wait(11, _never) == (1, 2)
        assert arrivals[0].arrive(11, _never) == (1, 2)
        assert arrivals[0].passed_by_all == 10


def test_the_one_that_chooses_waits_for_those_that_lack_rounds() -> None:
    with _connected() as (thread, arrivals):
        for one in arrivals[:2]:
            one.passed(11)
        thread.finish(11, 0.05)
        assert not thread.choice.has_passed(11)
        arrivals[2].passed(11)
        thread.finish(11, 10)
        assert thread.choice.has_passed(11)


def test_a_lost_member_ends_the_view_for_all_but_not_what_was_chosen_before() -> None:
    with _connected() as (_, arrivals):
        arrivals[2]._notify(1, 11)
        assert arrivals[1].arrive(11, _never) == (1, 2)
        arrivals[2].close()
        deadline = time.monotonic() + 120
        while not arrivals[0]._has_ended and time.monotonic() < deadline:
            arrivals[0].chosen(12)
            time.sleep(0.01)
        assert arrivals[0].wait(11, _never) == (1, 2)
        with pytest.raises(PeerLostError, match="was closed"):
            arrivals[0].wait(12, _never)


def test_a_broken_view_ends_the_wait() -> None:
    def broken(waited_s: float) -> None:
        raise PeerLostError(f"after {waited_s} s")

    with _connected() as (_, arrivals), pytest.raises(PeerLostError, match="after"):
        arrivals[0].arrive(11, broken)


def test_without_the_one_that_chooses_a_member_cannot_arrive() -> None:
    own, other = socket.socketpair()
    arrivals = Arrivals(range(2), own)
    other.close()
    with pytest.raises(PeerLostError, match="the lowest member cannot be reached"):
        arrivals.arrive(1, _never)
    arrivals.passed(1)
    arrivals.close()
