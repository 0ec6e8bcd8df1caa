"""Keys of published tables in memory, and their rows in mapped files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stratagem.parameter_server.server.tables.table_chains import TableChain
from stratagem.parameter_server.server.tables.table_files import TableFile
from stratagem.parameter_server.server.tables.table_versions import TableVersions

_NO_ROW = -1


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Rows of one file: sorted keys, the number of each one's row in `rows`, or no row."""

    keys: np.ndarray
    numbers: np.ndarray
    rows: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Slots:
    """Keys by slot, in the newest version that was read."""

    keys: np.ndarray
    are_used: np.ndarray


class ServedPart:
    """A shard of a table in one version: a segment with all rows, and those with changes since.

    `save` is the identity of the version; `slots` are for the next version.
    """

    def __init__(
        self, save: str, buckets: range, segments: tuple[_Segment, ...], slots: _Slots
    ) -> None:
        self.save = save
        self.buckets = buckets
        self.slots = slots
        self.segments = segments

    def rows(
        self, keys: np.ndarray, dtype: np.dtype, row_shape: tuple[int, ...]
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields places of keys, and their rows. Keys without a row are left out."""
        left = np.arange(len(keys))
        for segment in reversed(self.segments):
            if not (len(left) and len(segment.keys)):
                continue
            wanted = keys[left]
            places = np.searchsorted(segment.keys, wanted)
            places[places == len(segment.keys)] = 0
            is_here = segment.keys[places] == wanted
            numbers = segment.numbers[places[is_here]]
            has_row = numbers != _NO_ROW
            values = segment.rows[numbers[has_row]].view(dtype).reshape(-1, *row_shape)
            yield left[is_here][has_row], values
            left = left[~is_here]


def served_parts(
    versions: TableVersions,
    number: int,
    table: str,
    num_parts: int,
    earlier: Mapping[tuple[str, int], ServedPart],
) -> list[ServedPart]:
    """Returns the parts of a table in a version; `earlier` has parts of the version before.

    Only files that `earlier` has not are read.

    Raises:
        DataLossError: a file is missing, damaged or out of order.
    """
    parts: list[ServedPart] = []
    for part in range(num_parts):
        described = versions.chain(number, table, part)
        parts.append(_served(versions, described, earlier.get((table, part))))
    return parts


def _served(
    versions: TableVersions, described: Mapping[str, Any], earlier: ServedPart | None
) -> ServedPart:
    files = described["files"]
    saves = [save for _, _, save in files]
    first, count = described["buckets"]
    buckets = range(first, first + count)
    segments: tuple[_Segment, ...] = ()
    slots = _Slots(np.empty(0, np.int64), np.empty(0, np.bool_))
    base = None
    if earlier is not None and earlier.save in saves and earlier.buckets == buckets:
        base, segments, slots = earlier.save, earlier.segments, earlier.slots
        files = files[: saves.index(base)]
    if files:
        with TableChain(versions.folder, {**described, "files": files}, base) as chain:
            for file in reversed(chain.files):
                segment, slots = _segment(file, slots)
                segments = (*segments, segment)
    return ServedPart(saves[0], buckets, segments, slots)


def _segment(file: TableFile, before: _Slots) -> tuple[_Segment, _Slots]:
    """Returns the rows of a file, and the slots after it."""
    row_bytes = file.head.row_bytes
    is_found = np.zeros(max(len(before.keys), file.end.rows.num_slots), np.bool_)
    after = _Slots(_padded(before.keys, len(is_found)), _padded(before.are_used, len(is_found)))
    keys, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for part in file.parts(is_reversed=True):
        slots, freed = part.rows.slots, part.rows.freed
        is_new = ~is_found[slots]
        after.are_used[freed[~is_found[freed]]] = False
        is_found[slots] = is_found[freed] = True
        after.are_used[slots[is_new]] = True
        after.keys[slots[is_new]] = part.rows.keys[is_new]
        keys.append(part.rows.keys[is_new])
        numbers.append(part.offset // row_bytes + np.flatnonzero(is_new))
    # Keys that changed slots had: they have no row now, unless it moved to another slot.
    former = before.keys[is_found[: len(before.keys)] & before.are_used]
    numbers.append(np.full(len(former), _NO_ROW))
    sorted_keys, firsts = np.unique(np.concatenate([*keys, former]), return_index=True)
    rows = np.frombuffer(file.map, f"V{row_bytes}", len(file.map) // row_bytes)
    return _Segment(sorted_keys, np.concatenate(numbers)[firsts], rows), after


def _padded(array: np.ndarray, size: int) -> np.ndarray:
    padded = np.zeros(size, array.dtype)
    padded[: len(array)] = array
    return padded
