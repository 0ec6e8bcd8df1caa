"""Rounds that late members are left out of, and losses while a member lacks rounds."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from stratagem.group.elastic import backed_rounds
from stratagem.group.elastic import peer_connections as exchange_times
from stratagem.group.elastic.backed_rounds import (
    Arrivals,
    ArrivalsThread,
    BackedRounds,
    CombinedRound,
    CombinedRounds,
    RoundChoice,
    scale_of_sums,
)
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import ExchangeTimes, PeerConnections, PeerLostError
from stratagem.observe.run_events.wait_clock import WaitClock
from tests.unit.group.process_group.members import together
from tests.unit.observe.run_events.test_wait_clock import ticking

_Log = list[tuple[tuple[int, ...], bytes]]
_SIZE = 40_000  # a sum that is sent in shards


@pytest.fixture
def members(make_cluster) -> list[ElasticGroup]:
    return make_cluster(4, num_backups=1).started(4)


def _value(member: int, number: int) -> np.ndarray:
    rng = np.random.default_rng(1000 * number + member)
    return rng.normal(size=_SIZE).astype(np.float32)


def _step(group: ElasticGroup, number: int, log: _Log) -> bool:
    """Runs a round of two operations; adds what it combines to the log if it is committed."""
    own = _value(group._first.process_id, number)
    total, small = np.empty_like(own), np.empty(3, np.float32)
    group.begin_round("step", is_backed=True)
    group.operate(lambda peers: peers.reduce(own, total, np.add), total)
    group.operate(lambda peers: peers.reduce(own[:3], small, np.add), small)
    is_committed = group.commit()
    group.tell()
    if is_committed:
        np.testing.assert_array_equal(small, total[:3])
        log.append((group.participants, total.tobytes()))
    return is_committed


def _expected(participants: tuple[int, ...], number: int, count: int) -> bytes:
    """Returns the sum of a round, by NumPy in the order of members."""
    total = _value(participants[0], number)
    for member in participants[1:]:
        total = total + _value(member, number)
    if len(participants) < count:
        total *= count / len(participants)
    return total.tobytes()


class _Training:
    """Members that run a number of rounds in threads, with a pause before some of them."""

    def __init__(
        self,
        groups: list[ElasticGroup],
        num_rounds: int,
        pause: Callable[[int, int], None] = lambda member, number: None,
    ) -> None:
        self.groups, self.logs = groups, [_Log() for _ in groups]
        self.counts: list[list[int]] = [[] for _ in groups]
        self._num_rounds, self._pause = num_rounds, pause
        self._threads = [
            threading.Thread(target=self._train, args=(member,), daemon=True)
            for member in range(len(groups))
        ]
        for thread in self._threads:
            thread.start()

    def _train(self, member: int) -> None:
        group, log = self.groups[member], self.logs[member]
        while len(log) < self._num_rounds:
            self._pause(member, len(log))
            count = group.num_processes
            try:
                if _step(group, len(log), log):
                    self.counts[member].append(count)
            except Exception:
                if group._inbox._is_closed:  # by the test
                    return
                raise

    def wait(self, *members: int) -> None:
        for member in members:
            self._threads[member].join(120)
            assert not self._threads[member].is_alive()

    def wait_for_round(self, member: int, number: int) -> None:
        deadline = time.monotonic() + 120
        while len(self.logs[member]) < number and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(self.logs[member]) >= number

    def check(self, *members: int) -> None:
        """Checks that members have the same log, and that its sums are those of NumPy."""
        first = self.logs[members[0]]
        for member in members[1:]:
            assert [one for one, _ in self.logs[member]] == [one for one, _ in first]
            assert self.logs[member] == first
        counts = self.counts[members[0]]
        for number, ((participants, total), count) in enumerate(zip(first, counts, strict=True)):
            assert total == _expected(participants, number, count)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_a_late_member_is_left_out_and_has_the_same_values(members, late) -> None:
    def pause(member: int, number: int) -> None:
        if member == late and number in (3, 4):  # it comes when the others have made the round
            training.wait_for_round(1 if late == 0 else 0, number + 1)

    training = _Training(members, 8, pause)
    training.wait(0, 1, 2, 3)
    training.check(0, 1, 2, 3)
    others = tuple(member for member in range(4) if member != late)
    assert training.logs[late][3][0] == others
    assert members[late].participants  # of a round that it may be no part of


def test_sums_of_members_at_random_moments_are_those_of_the_participants(members) -> None:
    chance = [random.Random(member) for member in range(4)]

    def pause(member: int, number: int) -> None:
        if chance[member].random() < 0.2:
            time.sleep(0.02)
        if number == 30 and member == 3:
            training.wait_for_round(0, 31)

    training = _Training(members, 60, pause)
    training.wait(0, 1, 2, 3)
    training.check(0, 1, 2, 3)
    sizes = {len(participants) for participants, _ in training.logs[0]}
    assert 3 in sizes


def test_a_late_member_learns_it_before_it_computes(members) -> None:
    log: _Log = []
    together(3, lambda member: _step(members[member], 0, [] if member else log))
    deadline = time.monotonic() + 120
    while not members[3].is_late() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert members[3].is_late()
    other: _Log = []
    assert _step(members[3], 0, other)
    assert other == log
    assert not members[3].has_taken_part
    assert members[0].has_taken_part
    assert not members[3].is_late()


def test_rounds_of_all_wait_for_one_that_lacks_rounds(members) -> None:
    def act(member: int) -> list[int]:
        log: _Log = []
        for number in range(4):
            if member == 2 and not number:
                time.sleep(0.2)
            _step(members[member], number, log)
        return members[member].exchange("end", len(log))

    assert together(4, act) == [[4] * 4] * 4


def test_a_member_that_lacks_too_much_is_waited_for(members, monkeypatch) -> None:
    monkeypatch.setattr(backed_rounds, "_MAX_BEHIND", 2)
    for group in members:
        if (thread := group._backing._thread) is not None:
            thread.choice.max_behind = 2
    resumed = threading.Event()

    def pause(member: int, number: int) -> None:
        if member == 3 and number == 1:
            resumed.wait(120)

    training = _Training(members, 8, pause)
    training.wait_for_round(0, 3)
    time.sleep(0.2)
    assert len(training.logs[0]) == 3  # rounds 1 and 2 are what member 3 lacks
    resumed.set()
    training.wait(0, 1, 2, 3)
    training.check(0, 1, 2, 3)


@pytest.fixture
def abrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes members leave at once, as if they were killed."""
    monkeypatch.setattr(BackedRounds, "finish", lambda *arguments: None)


@pytest.mark.usefixtures("abrupt")
@pytest.mark.parametrize("lost", [[0], [1], [2]], ids=str)
def test_rounds_are_delivered_although_a_participant_is_lost(members, lost) -> None:
    """Member 0 is the lowest one, and sends the rounds to the one that lacks them."""
    resumed = threading.Event()

    def pause(member: int, number: int) -> None:
        if member == 3 and number == 2:
            resumed.wait(120)

    training = _Training(members, 12, pause)
    training.wait_for_round(2, 6)
    for member in lost:
        members[member].close()
    resumed.set()
    left = [member for member in range(4) if member not in lost]
    training.wait(*left)
    training.check(*left)
    assert training.logs[3][2][0] == (0, 1, 2)
    assert members[3].view.members == tuple(left)


@pytest.mark.usefixtures("abrupt")
def test_members_lost_one_after_the_other_while_one_lacks_rounds_of_each_view(make_cluster) -> None:
    groups = make_cluster(5, num_backups=1).started(5)
    resumed = threading.Event()

    def pause(member: int, number: int) -> None:
        if member == 4 and number == 2:
            resumed.wait(120)

    training = _Training(groups, 12, pause)
    training.wait_for_round(3, 4)
    groups[0].close()
    resumed.set()
    training.wait_for_round(3, 6)
    groups[1].close()
    training.wait(2, 3, 4)
    training.check(2, 3, 4)


@pytest.mark.usefixtures("abrupt")
def test_one_goes_on_by_itself_if_all_that_have_a_round_are_lost(make_cluster) -> None:
    groups = make_cluster(2, num_backups=1).started(2)
    resumed = threading.Event()

    def pause(member: int, number: int) -> None:
        if member == 1 and number == 2:
            resumed.wait(120)

    groups[0]._connections._feed.send = lambda peers, message: None  # nothing is delivered
    training = _Training(groups, 6, pause)
    training.wait_for_round(0, 4)
    groups[0].close()
    resumed.set()
    training.wait(1)
    participants = [one for one, _ in training.logs[1]]
    assert len(participants) == 6
    assert participants[2:] == [(1,)] * 4


def test_those_that_leave_at_the_end_deliver_what_the_last_one_lacks(make_cluster) -> None:
    groups = make_cluster(3, num_backups=1).started(3)
    others_made = threading.Event()

    def act(member: int) -> _Log:
        log: _Log = []
        for number in range(10):
            if member == 2 and number == 4:
                assert others_made.wait(120)
            assert _step(groups[member], number, log)
            if member == 0 and number == 4:
                others_made.set()
        groups[member].close()
        return log

    first, second, third = together(3, act)
    assert first == second == third
    assert third[4][0] == (0, 1)


def test_one_that_is_left_out_waits_for_values_and_for_no_member(make_cluster, monkeypatch) -> None:
    monkeypatch.setattr(exchange_times, "time", ticking())
    groups = make_cluster(3, num_backups=1).started(3)
    clocks = [WaitClock() for _ in groups]
    for group, clock in zip(groups, clocks, strict=True):
        group._times.close()  # it measures by the clock of this process
        group._times = ExchangeTimes(clock, waits_for_all=False)
        assert group._connections is not None
        group._connections._times = group._times
    are_done = threading.Barrier(3)

    def act(member: int) -> None:
        log: _Log = []
        if member == 2:
            are_done.wait(120)
        for number in range(3):
            assert _step(groups[member], number, log)
        if member != 2:
            are_done.wait(120)
        assert [one for one, _ in log] == [(0, 1)] * 3

    together(3, act)
    assert clocks[2].peers_s == 0
    assert clocks[2].transfer_s > 0


def test_members_with_other_numbers_of_backups_are_refused(make_cluster) -> None:
    cluster = make_cluster(2)
    clusters = [dataclasses.replace(cluster, num_backups=index) for index in range(2)]
    errors = together(2, lambda index: clusters[index].member(index))
    assert all("states that exclude each other" in str(error) for error in errors)


def test_rounds_that_are_not_backed_have_all_members(members) -> None:
    def act(member: int) -> float:
        if member == 1:
            time.sleep(0.1)
        own, total = np.full(2, 2.0**member, np.float32), np.empty(2, np.float32)
        members[member].begin_round("all")
        members[member].operate(lambda peers: peers.reduce(own, total, np.add), total)
        members[member].operate(PeerConnections.barrier)
        assert members[member].commit()
        return float(total[0])

    assert together(4, act) == [15.0] * 4


@pytest.mark.parametrize(
    ("lengths", "ranks", "expected"),
    [
        (None, [0, 1, 2], 1.0),
        (None, [0, 2], 1.5),
        ((4, 4, 3), [0, 1], 11 / 8),
        ((4, 4, 3), [2], 11 / 3),
        ((4, 4, 3), [0, 1, 2], 1.0),
    ],
)
def test_sums_stand_for_the_rows_of_all(lengths, ranks, expected) -> None:
    assert scale_of_sums(lengths, ranks, 3) == expected


# The choice of participants: by a table of notices, and over connections.


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


# Rounds as bytes, and those that are kept.


@pytest.mark.parametrize(
    "results", [pytest.param((), marks=pytest.mark.slow), (b"",), (b"ab", b"", bytes(70_000))]
)
def test_a_round_is_the_same_after_it_was_sent(results) -> None:
    one = CombinedRound(2**40, (0, 2, 70_000), (0, 70_000), results)
    assert CombinedRound.decode(one.encode()) == one
    assert CombinedRound.decode(bytearray(one.encode())) == one


def test_rounds_are_kept_until_all_have_them() -> None:
    rounds = CombinedRounds()
    for number in (7, 5, 6):
        rounds.keep(CombinedRound(number, (0, 1), (0,), ()))
    assert [one.number for one in rounds.after(5)] == [6, 7]
    rounds.drop(6)
    assert [one.number for one in rounds.after(0)] == [7]
    assert len(rounds) == 1
