"""Sums, gathers and exchanges of arrays between connected members."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.elastic import peer_connections as exchange_times
from stratagem.group.elastic import peer_connections as handover
from stratagem.group.elastic.backed_rounds import Arrivals
from stratagem.group.elastic.peer_connections import (
    Brokenness,
    DivergedError,
    ExchangeTimes,
    Feed,
    PeerConnections,
    PeerLostError,
    TrainingState,
    close_after_use,
    hand_over,
    receive,
)
from stratagem.observe.run_events.wait_clock import WaitClock
from tests.unit.group.process_group.members import together
from tests.unit.observe.run_events.test_wait_clock import FakeTime

_COUNT = 3


def _never(waited_s: float) -> None:
    assert waited_s < 120


@pytest.fixture
def peers() -> Iterator[list[PeerConnections]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(_COUNT)]
    for one, other in itertools.combinations(range(_COUNT), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    connections = [
        PeerConnections(0, range(_COUNT), own, sockets[own], _never) for own in range(_COUNT)
    ]
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


@pytest.mark.parametrize("ufunc", [np.maximum, np.minimum])
def test_largest_and_smallest_values(peers, ufunc) -> None:
    own = [np.arange(5, dtype=np.float32) * (-1) ** i for i in range(_COUNT)]
    totals = [np.empty_like(one) for one in own]
    together(_COUNT, lambda i: peers[i].reduce(own[i], totals[i], ufunc))
    np.testing.assert_array_equal(totals[2], ufunc.reduce(own))


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


def test_small_types_are_not_widened(peers) -> None:
    own = [np.full(3, 1.5, ml_dtypes.bfloat16) for _ in range(_COUNT)]
    totals = [np.empty_like(one) for one in own]
    together(_COUNT, lambda i: peers[i].reduce(own[i], totals[i], np.add))
    assert totals[0].dtype == ml_dtypes.bfloat16
    assert totals[0].astype(float).tolist() == [4.5] * 3


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


def test_some_members_combine_their_values_and_scale_sums_of_floats(peers) -> None:
    for size in (5, 100_003):
        own = [np.full(size, 10.0**i, np.float32) for i in range(_COUNT)]
        totals = [np.empty_like(one) for one in own]
        counts = [np.empty(2, np.int32) for _ in own]

        def act(i: int, own: list = own, totals: list = totals, counts: list = counts) -> None:
            peers[i].begin_round(1, "step")
            peers[i].take_part((0, 2), 1.5)
            peers[i].reduce(own[i], totals[i], np.add)
            peers[i].reduce(np.ones(2, np.int32), counts[i], np.add)
            peers[i].barrier()

        together(1, lambda _: together(2, lambda place: act(2 * place)))
        assert (totals[0] == 151.5).all()
        np.testing.assert_array_equal(totals[0], totals[2])
        assert counts[0].tolist() == [2, 2]


def test_rows_of_members_that_take_no_part_are_zeros(peers) -> None:
    everyone = [np.full((_COUNT, 2), 7, np.int64) for _ in range(_COUNT)]

    def act(place: int) -> None:
        peers[2 * place].take_part((0, 2), 1.0)
        peers[2 * place].gather_into(np.array([place + 1, 9]), everyone[2 * place])

    together(2, act)
    assert everyone[0].tolist() == everyone[2].tolist() == [[1, 9], [0, 0], [2, 9]]


def test_a_whole_round_is_sent_before_what_follows(peers) -> None:
    content = bytes(range(256)) * 10_000

    def act(i: int) -> object:
        peers[i].begin_round(4, "all")
        if i == 0:
            peers[0].send_combined([1, 2], 3, content)
            peers[0].barrier()
            return None
        received = peers[i].receive_combined(0)
        peers[i].barrier()
        return bytes(received)

    assert together(_COUNT, act) == [None, content, content]
    peers[0].finish(10)


@pytest.mark.slow
def test_another_message_in_place_of_a_round_is_noticed(peers) -> None:
    def act(i: int) -> object:
        peers[i].begin_round(4, "all")
        return peers[i].barrier() if i else peers[0].receive_combined(1)

    error, *_ = together(2, act)
    with pytest.raises(DivergedError, match="sent another operation than a whole round: 1 of"):
        raise error
    for one in peers:
        one.close()


# Waiting for members, and values in transit.

_MEMBERS = (0, 1, 2)


@pytest.fixture
def clock(monkeypatch) -> FakeTime:
    return FakeTime(monkeypatch, exchange_times)


def test_late_member_is_waited_for_and_its_values_come_at_once(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits)
    times.begin_operation(follows_work=True)
    times.begin_swap()
    clock.now_s += 0.125
    times.hear(1)
    clock.now_s += 0.5
    times.hear(2)
    clock.now_s += 0.25
    times.hear(2)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.625, 0.25)
    assert waits.measures_transfers


def test_second_swap_waits_for_values_in_transit(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits)
    times.begin_operation(follows_work=True)
    for _ in range(2):
        times.begin_swap()
        clock.now_s += 0.5
        times.hear(1)
        times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.5, 0.5)


def test_operation_that_follows_no_work_waits_for_nobody(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits)
    times.begin_operation(follows_work=False)
    times.begin_swap()
    clock.now_s += 0.5
    times.hear(1)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0, 0.5)


def test_one_that_takes_part_waits_until_enough_members_have_arrived(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits, waits_for_all=False)
    times.begin_operation(follows_work=True)
    clock.now_s += 0.5
    times.end_waiting()
    times.begin_swap()
    clock.now_s += 0.25
    times.hear(1)
    times.end_swap()
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0.5, 0.25)


def test_one_that_is_left_out_waits_for_no_member(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits, waits_for_all=False)
    times.begin_operation(follows_work=True)
    times.follow()
    times.hear(1)
    clock.now_s += 0.5
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0, 0.5)


def test_broken_operation_counts_until_its_end(clock) -> None:
    waits = WaitClock()
    times = ExchangeTimes(waits)
    times.begin_operation(follows_work=True)
    times.begin_swap()
    clock.now_s += 2.0
    times.end_operation()
    assert (waits.peers_s, waits.transfer_s) == (0, 2.0)


def test_members_measure_who_came_late(clock, monkeypatch) -> None:
    """The late one computes for 300 seconds, of a clock that moves for nothing else."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in _MEMBERS]
    for one, other in itertools.combinations(_MEMBERS, 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    clocks = [WaitClock() for _ in _MEMBERS]
    times = [ExchangeTimes(one) for one in clocks]
    peers = [
        PeerConnections(0, _MEMBERS, own, sockets[own], lambda waited_s: None, times[own])
        for own in _MEMBERS
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


def test_a_group_that_has_ended_leaves_the_clock_as_it_was() -> None:
    waits = WaitClock()
    ExchangeTimes(waits, waits_for_all=False).close()
    assert (waits.measures_transfers, waits.waits_for_all) == (False, True)


# States that are sent to newcomers, over connections in one process.

_COUNT_OF_HANDOVER = 4
_STATE = TrainingState(
    {"step": 3},
    [
        np.arange(200_000, dtype=np.float32).reshape(1000, 200).T,
        np.float64(2.5),
        np.empty((0, 3), np.int8),
        np.array([True, False]),
        np.full(3, 1.5, ml_dtypes.bfloat16),
        *(np.full(2, number) for number in range(2000)),
    ],
)


@pytest.fixture
def peers_of_handover() -> Iterator[list[PeerConnections]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(_COUNT_OF_HANDOVER)]
    for one, other in itertools.combinations(range(_COUNT_OF_HANDOVER), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    connections = [
        PeerConnections(0, range(_COUNT_OF_HANDOVER), own, sockets[own], lambda waited_s: None)
        for own in range(_COUNT_OF_HANDOVER)
    ]
    yield connections
    for one in connections:
        one.close()


def _exchange(
    peers_of_handover: list[PeerConnections], check: Any = lambda document: None
) -> list[Any]:
    """Member 1 sends its state to members 0 and 3."""

    def act(own: int) -> Any:
        if own in (0, 3):
            return receive(peers_of_handover[own], 1, [0, 3], check)
        return hand_over(peers_of_handover[own], 1, [0, 3], (lambda: _STATE) if own == 1 else None)

    return together(_COUNT_OF_HANDOVER, act)


def test_newcomers_receive_the_document_and_all_arrays(peers_of_handover) -> None:
    received = _exchange(peers_of_handover)
    for one in (received[0], received[3]):
        assert one.document == _STATE.document
        assert len(one.arrays) == len(_STATE.arrays)
        for mine, theirs in zip(one.arrays, map(np.asarray, _STATE.arrays), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)


def test_all_can_go_on_with_the_round(peers_of_handover) -> None:
    _exchange(peers_of_handover)
    assert (
        together(_COUNT_OF_HANDOVER, lambda own: peers_of_handover[own].barrier(own))
        == [[0, 1, 2, 3]] * _COUNT_OF_HANDOVER
    )


def test_changed_data_is_an_error(peers_of_handover, monkeypatch) -> None:
    monkeypatch.setattr(handover, "_check_sum", _check_all_but_one(handover._check_sum))
    errors = _exchange(peers_of_handover)
    for one in (errors[0], errors[3]):
        assert isinstance(one, DataLossError)
        assert "The CRC-32 of array 1 that a member sent is" in str(one)


def _check_all_but_one(original: Any) -> Any:
    def check(found: int, expected: int, name: str) -> None:
        original(found ^ (name == "array 1"), expected, name)

    return check


def test_a_document_that_does_not_fit_is_an_error_before_arrays_are_sent(peers_of_handover) -> None:
    def refuse(document: dict[str, Any]) -> None:
        raise ValueError(f"not {document}")

    def act(own: int) -> Any:
        if own == 3:
            with (
                peers_of_handover[own]._sockets[1],
                pytest.raises(ValueError, match=r"not \{'step': 3\}"),
            ):
                receive(peers_of_handover[own], 1, [3], refuse)
            return None
        return None if own != 1 else hand_over(peers_of_handover[own], 1, [3], lambda: _STATE)

    error = together(_COUNT_OF_HANDOVER, act)[1]
    assert isinstance(error, ConnectionError)


def test_a_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(DataLossError, match="received an array of dtype"):
        handover._dtype("i4,(2)f8")


# Sockets that one thread closes while another uses them.


def _swapping(own: socket.socket, check: Brokenness) -> tuple[Callable[[], object], object]:
    connections = PeerConnections(0, (0, 1), 0, {1: own}, check)
    array = np.zeros(3, np.float32)
    return (lambda: connections.reduce(array, array, np.add)), connections


def _arriving(own: socket.socket, check: Brokenness) -> tuple[Callable[[], object], object]:
    arrivals = Arrivals((0, 1), own)
    return (lambda: arrivals.arrive(1, check)), arrivals


@pytest.mark.parametrize("make", [_swapping, _arriving])
def test_a_socket_in_use_is_closed_when_its_user_has_noticed(make) -> None:
    """Its number would belong to the next file; the user would read what is not its own."""
    own, other = socket.socketpair()
    is_in_use, may_continue = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def check(waited_s: float) -> None:
        is_in_use.set()
        assert may_continue.wait(120)

    operate, connections = make(own, check)

    def use() -> None:
        try:
            operate()
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


# Messages to members that read late.


@pytest.fixture
def pair() -> Iterator[tuple[Feed, socket.socket]]:
    own, other = socket.socketpair()
    own.settimeout(0)
    feed = Feed({1: own})
    yield feed, other
    feed.close()
    own.close()
    other.close()


def _read(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += connection.recv(size - len(data))
    return bytes(data)


def test_messages_arrive_in_order_while_the_sender_goes_on(pair) -> None:
    feed, other = pair
    large = bytes(range(256)) * 20_000  # more than the system buffers
    assert feed.free_of([1, 2]) == [1, 2]
    for message in (b"first", large, b"last"):
        feed.send([1], message)
    assert feed.is_busy(1)
    assert feed.free_of([1, 2]) == [2]
    assert _read(other, len(large) + 9) == b"first" + large + b"last"
    feed.finish(10)
    assert not feed.is_busy(1)


def test_the_wait_for_one_that_does_not_read_is_limited(pair) -> None:
    feed, _ = pair
    feed.send([1], bytes(10_000_000))
    feed.finish(0.05)
    assert feed.is_busy(1)


def test_messages_for_a_lost_member_are_dropped(pair) -> None:
    feed, other = pair
    other.close()
    feed.send([1], bytes(10_000_000))
    deadline = time.monotonic() + 120
    while feed.is_busy(1) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not feed.is_busy(1)


def test_without_messages_there_is_no_thread(pair) -> None:
    feed, _ = pair
    assert feed._thread is None
    assert not feed.is_busy(1)
