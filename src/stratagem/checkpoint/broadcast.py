"""Broadcast of arrays read by process 0, so that no other process needs access to the folder."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology
from stratagem.group.current import current_group

_Arrays = dict[str, np.ndarray[Any, Any]]

_MIN_PIECE_BYTES = 2**16
_MAX_PIECE_BYTES = 2**25


def broadcast_from_first(
    items: Mapping[str, _Arrays] | None, entries: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, _Arrays]:
    """Returns process 0's arrays by item and path. Call on every process.

    `items` is None on other processes. `entries` holds path, shape and dtype of each array, the
    same on all processes.
    """
    group = current_group()
    if group is None:
        assert items is not None
        return dict(items)
    is_first = group.process_id == 0
    shared: dict[str, _Arrays] = {
        name: {
            entry["path"]: np.asarray(items[name][entry["path"]], order="C")
            if is_first and items is not None
            else np.empty(entry["shape"], np.dtype(entry["dtype"]))
            for entry in entries[name]
        }
        for name in entries
    }
    flats = [_bytes_of(array) for arrays in shared.values() for array in arrays.values()]
    total_bytes = sum(flat.size for flat in flats)
    topology = Topology(tuple(jax.devices()))
    # All pieces have one of a few sizes, since each size compiles a program.
    piece_bytes = min(
        max(2 ** math.ceil(math.log2(max(total_bytes, 1))), _MIN_PIECE_BYTES), _MAX_PIECE_BYTES
    )
    piece = np.zeros(piece_bytes, np.uint8)
    for spans in _pieces([flat.size for flat in flats], piece_bytes):
        if is_first:
            for index, begin, end, at in spans:
                piece[at : at + end - begin] = flats[index][begin:end]
        received = np.asarray(compute_on_every_process(_on_all(topology, piece), _first))
        if not is_first:
            for index, begin, end, at in spans:
                flats[index][begin:end] = received[at : at + end - begin]
    return shared


def _pieces(
    sizes_bytes: Sequence[int], piece_bytes: int
) -> Iterator[list[tuple[int, int, int, int]]]:
    """Yields the spans of arrays that fill each piece: (array, begin, end, offset in the piece)."""
    spans: list[tuple[int, int, int, int]] = []
    at = 0
    for index, size_bytes in enumerate(sizes_bytes):
        begin = 0
        while begin < size_bytes:
            end = min(size_bytes, begin + piece_bytes - at)
            spans.append((index, begin, end, at))
            at += end - begin
            begin = end
            if at == piece_bytes:
                yield spans
                spans, at = [], 0
    if spans:
        yield spans


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)


def _on_all(topology: Topology, piece: np.ndarray[Any, Any]) -> jax.Array:
    return topology.stack([piece] * topology.num_local_replicas)


def _first(stacked: jax.Array) -> jax.Array:
    return jnp.asarray(stacked)[0]
