"""Sums, gathers and exchanges of arrays between connected members."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from stratagem.group.elastic.peer_connections import DivergedError, PeerConnections, PeerLostError
from tests.unit.group.process_group.members import together

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
