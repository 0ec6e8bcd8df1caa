"""Sums, gathers and exchanges of arrays between connected members."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from stratagem.group.elastic import peer_connections as exchange_times
from stratagem.group.elastic.peer_connections import (
    DivergedError,
    ExchangeTimes,
    PeerConnections,
    PeerLostError,
    close_after_use,
)
from stratagem.observe.wait_clock import WaitClock
from tests.unit.group.elastic.members import connected_peers
from tests.unit.group.process_group.members import together
from tests.unit.observe.test_wait_clock import FakeTime

_COUNT = 3


def _never(waited_s: float) -> None:
    assert waited_s < 120


@pytest.fixture
def peers() -> Iterator[list[PeerConnections]]:
    connections = connected_peers(_COUNT, _never)
    yield connections
    for one in connections:
        one.close()


@pytest.mark.parametrize("size", [0, 1, 2, 1000, 100_003, 2_000_000])
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_sums_are_those_of_numpy_in_order_on_all_members(peers, size, dtype) -> None:
    rng = np.random.default_rng(size)
    own = [(rng.normal(size=size) * 30).astype(dtype) for _ in range(_COUNT)]
    totals = [np.empty_like(one) for one in own]
    together(_COUNT, lambda i: peers[i].reduce(own[i], totals[i], np.add))
    expected = own[0] + own[1] + own[2]
    for total in totals:
        np.testing.assert_array_equal(total, expected)


@pytest.mark.parametrize("ufunc", [np.maximum, np.minimum, np.add])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_largest_and_smallest_values_and_sums_of_small_types(peers, ufunc, dtype) -> None:
    own = [np.arange(5).astype(dtype) * dtype((-1) ** i) for i in range(_COUNT)]
    totals = [np.empty_like(one) for one in own]
    together(_COUNT, lambda i: peers[i].reduce(own[i], totals[i], ufunc))
    np.testing.assert_array_equal(totals[2], ufunc.reduce(own), strict=True)


def test_a_sum_may_replace_its_addend(peers) -> None:
    own = [np.full(100_000, 10.0**i, np.float64) for i in range(_COUNT)]
    together(_COUNT, lambda i: peers[i].reduce(own[i], own[i], np.add))
    assert all((one == 111.0).all() for one in own)


def test_gathers_are_in_the_order_of_members(peers) -> None:
    everyone = [np.empty((_COUNT, 2), np.int64) for _ in range(_COUNT)]
    together(_COUNT, lambda i: peers[i].gather_into(np.array([i, -i]), everyone[i]))
    for one in everyone:
        assert one.tolist() == [[0, 0], [1, -1], [2, -2]]


def test_bytes_of_unlike_lengths(peers) -> None:
    received = together(_COUNT, lambda i: peers[i].gather(bytes([i]) * i * 100_000))
    assert received == [[bytes([i]) * i * 100_000 for i in range(_COUNT)]] * _COUNT


def test_all_to_all_is_a_transpose(peers) -> None:
    own = np.arange(_COUNT * _COUNT * 2, dtype=np.int32).reshape(_COUNT, _COUNT, 2)
    received = np.empty_like(own)
    together(_COUNT, lambda i: peers[i].all_to_all(own[i].ravel(), received[i].reshape(-1)))
    np.testing.assert_array_equal(received, own.transpose(1, 0, 2))


def test_a_closed_connection_is_a_lost_member(peers) -> None:
    peers[1]._sockets[0].shutdown(socket.SHUT_WR)
    with pytest.raises(PeerLostError, match="closed its connection"):
        peers[0].barrier()
    with pytest.raises(PeerLostError, match="cannot be reached:"):
        peers[1].barrier()
    peers[0].close()
    with pytest.raises(PeerLostError, match="cannot be reached:"):
        peers[2].barrier()


@pytest.mark.parametrize("differs", ["name", "round", "size"])
def test_unlike_operations_are_noticed(peers, differs) -> None:
    def act(i: int) -> None:
        odd = i == 2
        name = "other" if odd and differs == "name" else "step"
        peers[i].begin_round(8 if odd and differs == "round" else 7, name)
        size = 6 if odd and differs == "size" else 5
        peers[i].reduce(np.ones(size), np.ones(size), np.add)

    errors = together(_COUNT, act)
    found = [error for error in errors if isinstance(error, DivergedError)]
    assert found
    assert "and this one differ" in str(found[0])
    assert differs in str(found[0])


# Waiting for members, and values in transit.


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    return FakeTime(monkeypatch, exchange_times)


@pytest.mark.parametrize(
    ("swaps", "follows_work", "waits"),
    [
        # Each swap: who is heard after how long, None for nobody.
        ([[(0.125, 1), (0.5, 2), (0.25, 2)]], True, (0.625, 0.25)),
        ([[(0.5, 1)], [(0.5, 1)]], True, (0.5, 0.5)),
        ([[(0.5, 1)]], False, (0, 0.5)),
        ([[(2.0, None)]], True, (0, 2.0)),
    ],
    ids=["late member", "second swap in transit", "no work before", "broken"],
)
def test_waits_for_members_and_for_values_in_transit(clock, swaps, follows_work, waits) -> None:
    found = WaitClock()
    times = ExchangeTimes(found)
    times.begin_operation(follows_work=follows_work)
    for swap in swaps:
        times.begin_swap()
        for time_s, member in swap:
            clock.now_s += time_s
            if member is not None:
                times.hear(member)
        if swap[-1][1] is not None:
            times.end_swap()
    times.end_operation()
    assert (found.peers_s, found.transfer_s) == waits
    assert found.measures_transfers
    times.close()
    assert not found.measures_transfers


def test_members_measure_who_came_late(clock, monkeypatch) -> None:
    """The late one computes for 300 seconds, of a clock that moves for nothing else."""
    clocks = [WaitClock() for _ in range(_COUNT)]
    times = [ExchangeTimes(one) for one in clocks]
    peers = connected_peers(_COUNT, lambda waited_s: None, times)
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


# Sockets that one thread closes while another uses them.


def test_a_socket_in_use_is_closed_when_its_user_has_noticed() -> None:
    """Its number would belong to the next file; the user would read what is not its own."""
    own, other = socket.socketpair()
    is_in_use, may_continue = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def check(waited_s: float) -> None:
        is_in_use.set()
        assert may_continue.wait(120)

    connections = PeerConnections(0, (0, 1), 0, {1: own}, check)
    array = np.zeros(3, np.float32)

    def use() -> None:
        try:
            connections.reduce(array, array, np.add)
        except PeerLostError as error:
            errors.append(error)

    user = threading.Thread(target=use)
    user.start()
    assert is_in_use.wait(120)
    closer = threading.Thread(target=connections.close)
    closer.start()
    while other.recv(4096):  # until the connection has ended
        pass
    assert own.fileno() >= 0
    may_continue.set()
    user.join(120)
    closer.join(120)
    assert len(errors) == 1
    assert own.fileno() == -1
    other.close()


def test_a_connection_that_has_ended_is_closed() -> None:
    own, other = socket.socketpair()
    own.close()
    close_after_use([own, other], threading.RLock())
    assert own.fileno() == other.fileno() == -1
