"""Waiting for members, and values in transit."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading

import numpy as np
import pytest

from stratagem.group.elastic import peer_connections as exchange_times
from stratagem.group.elastic.peer_connections import ExchangeTimes, PeerConnections
from stratagem.observe.run_events.wait_clock import WaitClock
from tests.unit.group.process_group.members import together
from tests.unit.observe.run_events.test_wait_clock import FakeTime

_TASKS = {0: "worker 0", 1: "worker 1", 2: "worker 2"}


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    return FakeTime(monkeypatch, exchange_times)


def test_late_member_is_waited_for_and_its_values_come_at_once(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits)
    times.begin_operation(follows_work=True)
    times.begin_swap()
    clock.now_s += 0.125
    times.hear(1)
    times.receive_all(1)
    clock.now_s += 0.5
    times.hear(2)
    clock.now_s += 0.25
    times.hear(2)
    times.receive_all(2)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.625, 0.25)
    assert waits.received_s == {"worker 1": 0.0, "worker 2": 0.25}
    assert waits.measures_transfers


def test_second_swap_waits_for_values_in_transit(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits)
    times.begin_operation(follows_work=True)
    for _ in range(2):
        times.begin_swap()
        clock.now_s += 0.5
        times.hear(1)
        times.receive_all(1)
        times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.5, 0.5)
    assert waits.received_s == {"worker 1": 0.5}


def test_operation_that_follows_no_work_waits_for_nobody(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits)
    times.begin_operation(follows_work=False)
    times.begin_swap()
    clock.now_s += 0.5
    times.hear(1)
    times.receive_all(1)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s, waits.received_s) == (0, 0.5, {})


def test_one_that_takes_part_waits_until_enough_members_have_arrived(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits, waits_for_all=False)
    times.begin_operation(follows_work=True)
    clock.now_s += 0.5
    times.end_waiting()
    times.begin_swap()
    clock.now_s += 0.25
    times.hear(1)
    times.receive_all(1)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.5, 0.25)
    assert waits.received_s == {"worker 1": 0.25}


def test_one_that_is_left_out_waits_for_no_member(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits, waits_for_all=False)
    times.begin_operation(follows_work=True)
    times.follow()
    times.hear(1)
    clock.now_s += 0.5
    times.receive_all(1)
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s, waits.received_s) == (0, 0.5, {})


def test_broken_operation_counts_until_its_end(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(_TASKS, waits)
    times.begin_operation(follows_work=True)
    times.begin_swap()
    clock.now_s += 2.0
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0, 2.0)


def test_members_measure_who_came_late(clock, monkeypatch) -> None:
    """The late one computes for 300 seconds, of a clock that moves for nothing else."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in _TASKS]
    for one, other in itertools.combinations(_TASKS, 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    clocks = [WaitClock() for _ in _TASKS]
    times = [ExchangeTimes(_TASKS, one) for one in clocks]
    peers = [
        PeerConnections(0, tuple(_TASKS), own, sockets[own], lambda waited_s: None, times[own])
        for own in _TASKS
    ]
    own = np.ones(300_000, np.float32)
    wait_for_late = {member: threading.Event() for member in (0, 2)}
    for member, begun in wait_for_late.items():
        begin_swap = times[member].begin_swap
        monkeypatch.setattr(
            times[member], "begin_swap", lambda f=begin_swap, e=begun: (f(), e.set())
        )

    def add(member: int) -> None:
        if member == 1:
            assert all(begun.wait(120) for begun in wait_for_late.values())
            clock.now_s += 300
        times[member].begin_operation(follows_work=True)
        peers[member].reduce(own, np.empty_like(own), np.add)
        times[member].end_operation()

    with contextlib.ExitStack() as opened:
        for one in peers:
            opened.callback(one.close)
        assert together(3, add) == [None] * 3
    for member, one in enumerate(clocks):
        assert (one.peers_s, one.transfer_s) == (0 if member == 1 else 300, 0)
        assert sorted(one.received_s) == sorted(set(_TASKS.values()) - {_TASKS[member]})


def test_a_group_that_has_ended_leaves_the_clock_as_it_was() -> None:
    waits = WaitClock()
    ExchangeTimes(_TASKS, waits, waits_for_all=False).close()
    assert (waits.measures_transfers, waits.waits_for_all) == (False, True)
