"""Waiting for members, and values in transit."""

from __future__ import annotations

import itertools
import socket
import time

import numpy as np
import pytest

from stratagem.elastic import exchange_times
from stratagem.elastic.exchange_times import ExchangeTimes
from stratagem.elastic.peer_connections import PeerConnections
from stratagem.run_events.wait_clock import WaitClock
from tests.process_group.members import together
from tests.run_events.test_wait_clock import FakeTime

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


def test_members_measure_who_came_late() -> None:
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
    late_s = 0.3

    def add(member: int) -> float:
        time.sleep(late_s if member == 1 else 0.0)
        times[member].begin_operation(follows_work=True)
        begin_s = time.monotonic()
        peers[member].reduce(own, np.empty_like(own), np.add)
        took_s = time.monotonic() - begin_s
        times[member].end_operation()
        return took_s

    took_s = together(3, add)
    for member, one in enumerate(clocks):
        # The parts of an operation are all of it.
        assert one.peers_s + one.transfer_s == pytest.approx(took_s[member], abs=0.02)
        assert sorted(one.received_s) == sorted(set(_TASKS.values()) - {_TASKS[member]})
    assert clocks[0].peers_s > clocks[1].peers_s + late_s / 2
    assert clocks[2].peers_s > clocks[1].peers_s + late_s / 2
    for one in peers:
        one.close()


def test_a_group_that_has_ended_leaves_the_clock_as_it_was() -> None:
    waits = WaitClock()
    ExchangeTimes(_TASKS, waits, waits_for_all=False).close()
    assert (waits.measures_transfers, waits.waits_for_all) == (False, True)
