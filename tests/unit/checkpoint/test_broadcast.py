"""Pieces of a broadcast cover every byte of every array once, in order."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.checkpoint import restoration as broadcast
from stratagem.checkpoint.restoration import broadcast_from_first


@pytest.mark.parametrize("sizes", [[], [0], [1], [10], [3, 0, 4], [7, 7, 7], [100, 1, 63]])
@pytest.mark.parametrize("piece_bytes", [1, 7, 64])
def test_pieces_hold_all_bytes_in_order(sizes, piece_bytes) -> None:
    arrays = [np.arange(size) + 1000 * index for index, size in enumerate(sizes)]
    sent = []
    for spans in broadcast._pieces(sizes, piece_bytes):
        piece = np.full(piece_bytes, -1)
        for index, begin, end, at in spans:
            assert (piece[at : at + end - begin] == -1).all(), "spans overlap"
            piece[at : at + end - begin] = arrays[index][begin:end]
        sent.append(piece)
    together = np.concatenate([*sent, np.zeros(0)])
    np.testing.assert_array_equal(together[: sum(sizes)], np.concatenate([*arrays, np.zeros(0)]))
    assert (together[sum(sizes) :] == -1).all()
    assert len(sent) == -(-sum(sizes) // piece_bytes)


class Group:
    def __init__(self, process_id: int) -> None:
        self.process_id = process_id


def test_other_process_gets_the_bytes_of_the_first(monkeypatch) -> None:
    """Both processes in turn, with the pieces of the first recorded."""
    monkeypatch.setattr(broadcast, "_MIN_PIECE_BYTES", 4)
    monkeypatch.setattr(broadcast, "_MAX_PIECE_BYTES", 16)
    items = {
        "model": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3).T, "flag": np.array(True)},
        "other": {"empty": np.zeros((0, 2), np.int8), "count": np.array([7, 8], np.int64)},
    }
    entries = {
        name: [{"path": path, "shape": a.shape, "dtype": a.dtype.name} for path, a in own.items()]
        for name, own in items.items()
    }
    pieces = []
    monkeypatch.setattr(broadcast, "_on_all", lambda topology, piece: piece.copy())

    def record(piece, program):
        pieces.append(piece)
        return piece

    monkeypatch.setattr(broadcast, "current_group", lambda: Group(0))
    monkeypatch.setattr(broadcast, "compute_on_every_process", record)
    own = broadcast_from_first(items, entries)
    received = iter(list(pieces))
    monkeypatch.setattr(broadcast, "current_group", lambda: Group(1))
    monkeypatch.setattr(broadcast, "compute_on_every_process", lambda *_: next(received))
    for arrays in (own, broadcast_from_first(None, entries)):
        for name, expected in items.items():
            assert arrays[name].keys() == expected.keys()
            for path, array in expected.items():
                np.testing.assert_array_equal(arrays[name][path], array)
                assert arrays[name][path].dtype == array.dtype
    assert next(received, None) is None


def test_process_by_itself_has_the_arrays_already(monkeypatch) -> None:
    monkeypatch.setattr(broadcast, "current_group", lambda: None)
    items = {"model": {"a": np.ones(2)}}
    assert broadcast_from_first(items, {}) == items
