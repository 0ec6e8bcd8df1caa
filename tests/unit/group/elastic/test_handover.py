"""States that are sent to newcomers, over connections in one process."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.elastic import peer_connections as handover
from stratagem.group.elastic.peer_connections import (
    PeerConnections,
    TrainingState,
    hand_over,
    receive,
)
from tests.unit.group.process_group.members import together

_COUNT = 4
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
def peers() -> Iterator[list[PeerConnections]]:
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(_COUNT)]
    for one, other in itertools.combinations(range(_COUNT), 2):
        sockets[one][other], sockets[other][one] = socket.socketpair()
    connections = [
        PeerConnections(0, range(_COUNT), own, sockets[own], lambda waited_s: None)
        for own in range(_COUNT)
    ]
    yield connections
    for one in connections:
        one.close()


def _exchange(peers: list[PeerConnections], check: Any = lambda document: None) -> list[Any]:
    """Member 1 sends its state to members 0 and 3."""

    def act(own: int) -> Any:
        if own in (0, 3):
            return receive(peers[own], 1, [0, 3], check)
        return hand_over(peers[own], 1, [0, 3], (lambda: _STATE) if own == 1 else None)

    return together(_COUNT, act)


def test_newcomers_receive_the_document_and_all_arrays(peers) -> None:
    received = _exchange(peers)
    for one in (received[0], received[3]):
        assert one.document == _STATE.document
        assert len(one.arrays) == len(_STATE.arrays)
        for mine, theirs in zip(one.arrays, map(np.asarray, _STATE.arrays), strict=True):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)


def test_all_can_go_on_with_the_round(peers) -> None:
    _exchange(peers)
    assert together(_COUNT, lambda own: peers[own].barrier(own)) == [[0, 1, 2, 3]] * _COUNT


def test_changed_data_is_an_error(peers, monkeypatch) -> None:
    monkeypatch.setattr(handover, "_check_sum", _check_all_but_one(handover._check_sum))
    errors = _exchange(peers)
    for one in (errors[0], errors[3]):
        assert isinstance(one, DataLossError)
        assert "The CRC-32 of array 1 that a member sent is" in str(one)


def _check_all_but_one(original: Any) -> Any:
    def check(found: int, expected: int, name: str) -> None:
        original(found ^ (name == "array 1"), expected, name)

    return check


def test_a_document_that_does_not_fit_is_an_error_before_arrays_are_sent(peers) -> None:
    def refuse(document: dict[str, Any]) -> None:
        raise ValueError(f"not {document}")

    def act(own: int) -> Any:
        if own == 3:
            with peers[own]._sockets[1], pytest.raises(ValueError, match=r"not \{'step': 3\}"):
                receive(peers[own], 1, [3], refuse)
            return None
        return None if own != 1 else hand_over(peers[own], 1, [3], lambda: _STATE)

    error = together(_COUNT, act)[1]
    assert isinstance(error, ConnectionError)


def test_a_type_that_is_no_name_is_refused() -> None:
    with pytest.raises(DataLossError, match="received an array of dtype"):
        handover._dtype("i4,(2)f8")
