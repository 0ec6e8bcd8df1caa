"""Saved keyed tables: a file with all rows, and files with the changes since."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stratagem.errors import invalid
from stratagem.parameter_server.server.shards import SavedPart
from stratagem.parameter_server.server.tables.key_slots import SavedKeys, SlotOrder
from stratagem.parameter_server.server.tables.keyed_rows import COUNTERS, KeyedRows
from stratagem.parameter_server.server.tables.keyed_shard import KeyedShard, SavedTable
from stratagem.parameter_server.server.tables.row_formats import RowFormat, buckets_of
from stratagem.parameter_server.server.tables.saved_tables import (
    SavedRows,
    TableEnd,
    TableFile,
    TableFileWriter,
    TableVersions,
    damaged,
    file_name,
    remove_unneeded,
)
from stratagem.parameter_server.server.tables.table_options import (
    LeastFrequent,
    LeastRecent,
    victims,
)
from stratagem.resources import Closing


class TableChain(Closing):
    """A saved part of a table, read from the newest file and those that it continues.

    With `base`, only the changes since that save.

    Args:
        folder: folder that the names of the files are relative to.
        described: JSON with `files` (newest first: name, size in bytes and save), and `buckets`
            (first one and number).

    Raises:
        DataLossError: a file is missing, damaged, or not the one that the next file continues.
    """

    def __init__(self, folder: Path, described: Mapping[str, Any], base: str | None = None) -> None:
        first, count = described["buckets"]
        self.buckets = range(first, first + count)
        with contextlib.ExitStack() as stack:
            self.files: list[TableFile] = []
            for number, (name, size_bytes, save) in enumerate(described["files"]):
                file = stack.enter_context(TableFile(folder / name, size_bytes))
                wanted = self.files[-1].head.base if number else save
                if file.head.save != save or wanted != save:
                    raise damaged(file.path, "the next version does not continue this one")
                self.files.append(file)
            if self.files[-1].head.base != base:
                how = "it has changes of another version, which is not there"
                raise damaged(self.files[-1].path, how)
            self._closing = stack.pop_all()

    @property
    def end(self) -> TableEnd:
        """State besides rows."""
        return self.files[0].end

    def rows(self) -> Iterator[tuple[TableFile, SavedRows]]:
        """Yields each slot once, as its last record has it, with the file of the record.

        Slots that are not in use are left out.
        """
        is_found = [np.zeros(_num_slots(self.files, kind), np.bool_) for kind in _KINDS]
        for file in self.files:
            for part in file.parts(is_reversed=True):
                kept = [
                    _not_found(keys, found)
                    for keys, found in zip((part.rows, part.candidates), is_found, strict=True)
                ]
                yield file, _chosen(part, *kept)

    def close(self) -> None:
        """Closes all files."""
        self._closing.close()


_KINDS = ("rows", "candidates")


def load_table(
    table: KeyedShard,
    chains: Sequence[TableChain],
    buckets: range,
    version: int,
    storage_dtype: str | None = None,
) -> bool:
    """Puts saved rows of some buckets into an empty table; `version` is that of the server.

    `storage_dtype` is that of the saved rows. Rows of another one are rounded to that of the table.

    From one chain with the same buckets, rows get the same slots, so that training continues bit
    for bit: the result is then True. Otherwise they are rows of another number of servers.

    Raises:
        MemoryError: the rows do not fit in memory.
        ValueError: the table may not have so many rows.
    """
    ends = [chain.end for chain in chains]
    newest = max(end.version for end in ends)
    keyed = table.keyed
    saved_format = dataclasses.replace(table.format, storage_dtype=storage_dtype)
    is_same = _is_same(keyed, chains, buckets)
    evicted = np.empty(0, np.int64) if is_same else _excess(table, chains, buckets, newest)
    num_rows = num_candidates = place = counts_of_evicted = 0
    for chain in chains:
        age = newest - chain.end.version
        for _, part in chain.rows():
            if not is_same:
                own = _is_in(part.rows.keys, buckets)
                places = place + np.arange(np.count_nonzero(own))
                place += len(places)
                is_kept = ~np.isin(places, evicted)
                counts_of_evicted += int(part.rows.counts[own][~is_kept].sum(dtype=np.int64))
                own[own] = is_kept
                candidates = _is_in(part.candidates.keys, buckets)
                candidates &= np.cumsum(candidates) <= keyed.most_candidates - num_candidates
                part = _chosen(part, own, candidates)
                part = _numbered(part, num_rows, num_candidates)
                num_rows += len(part.rows.slots)
                num_candidates += len(part.candidates.slots)
            table.load(_saved_part(table, part, age, chain.end, saved_format))
    table.restored()
    if is_same:
        keyed.rows.set_order(ends[0].rows)
        keyed.candidates.set_order(ends[0].candidates)
    keyed.counters.update(_counters(chains, buckets, len(evicted), counts_of_evicted))
    keyed.version_offset = newest - version
    return is_same


def _is_same(keyed: KeyedRows, chains: Sequence[TableChain], buckets: range) -> bool:
    """Returns True if the saved slots can be those of the table."""
    return [chain.buckets for chain in chains] == [buckets] and (
        chains[0].end.rows.num_slots <= keyed.most_rows
        and chains[0].end.candidates.num_slots <= keyed.most_candidates
    )


def _counters(
    chains: Sequence[TableChain], buckets: range, num_evicted: int, counts_of_evicted: int
) -> dict[str, int]:
    """Returns the counters of the saved parts that begin in these buckets."""
    ends = [chain.end for chain in chains if chain.buckets.start in buckets]
    counters = {name: sum(end.counters[name] for end in ends) for name in COUNTERS}
    counters["evicted"] += num_evicted
    counters["evicted_updates"] += counts_of_evicted
    return counters


def _num_slots(files: Sequence[TableFile], kind: str) -> int:
    orders: list[SlotOrder] = [getattr(file.end, kind) for file in files]
    return max(order.num_slots for order in orders)


def _not_found(keys: SavedKeys, is_found: np.ndarray) -> np.ndarray:
    """Returns True for slots in use that no later record has, and notes all slots as found."""
    is_new = ~is_found[keys.slots]
    is_found[keys.slots] = is_found[keys.freed] = True
    return is_new


def _chosen(part: SavedRows, rows: np.ndarray, candidates: np.ndarray) -> SavedRows:
    """Returns the rows and candidates that are True in the masks."""
    kept = part.candidates.chosen(candidates)
    if rows.all():
        return SavedRows(part.rows.chosen(rows), kept, part.value, part.slots, part.offset)
    slots = {name: slot[rows] for name, slot in part.slots.items()}
    return SavedRows(part.rows.chosen(rows), kept, part.value[rows], slots)


def _is_in(keys: np.ndarray, buckets: range) -> np.ndarray:
    own = buckets_of(keys)
    return (own >= buckets.start) & (own < buckets.stop)


def _numbered(part: SavedRows, num_rows: int, num_candidates: int) -> SavedRows:
    """Returns the rows with the next slots."""
    rows, candidates = (
        dataclasses.replace(one, slots=np.arange(first, first + len(one.slots)))
        for one, first in ((part.rows, num_rows), (part.candidates, num_candidates))
    )
    return SavedRows(rows, candidates, part.value, part.slots)


def _saved_part(
    table: KeyedShard, part: SavedRows, age: int, end: TableEnd, saved_format: RowFormat
) -> SavedPart:
    """Returns rows as a journal has them, `age` versions newer."""
    rows, candidates = (
        dataclasses.replace(one, seen=one.seen + np.uint32(age))
        for one in (part.rows, part.candidates)
    )
    saved = SavedTable(rows, candidates, end.counters, end.initials)
    value = part.value
    if saved_format != table.format:
        value = table.format.stored(saved_format.expanded(value), rows.keys, rows.counts)
    return SavedPart(table.spec, rows.slots, value, part.slots, saved)


def _excess(
    table: KeyedShard, chains: Sequence[TableChain], buckets: range, newest: int
) -> np.ndarray:
    """Returns the places, in the order of reading, of rows that are too many and evicted."""
    counts, seen = [np.empty(0, np.uint32)], [np.empty(0, np.uint32)]
    for chain in chains:
        for _, part in chain.rows():
            own = _is_in(part.rows.keys, buckets)
            counts.append(part.rows.counts[own])
            seen.append(part.rows.seen[own] + np.uint32(newest - chain.end.version))
    num_rows = sum(map(len, counts))
    excess = num_rows - table.keyed.most_rows
    if excess <= 0:
        return np.empty(0, np.int64)
    eviction = table.options.eviction
    if not isinstance(eviction, LeastFrequent | LeastRecent):
        raise invalid(
            f"{num_rows} rows of {table.spec.name!r} were restored into one server.",
            expected=f"at most {table.keyed.most_rows} rows.",
            fix="use a larger max_rows, more servers, or an eviction policy.",
        )
    is_evictable = np.ones(num_rows, np.bool_)
    return victims(eviction, np.concatenate(counts), np.concatenate(seen), is_evictable, excess)


# Compaction of saved keyed tables: a file with all rows in place of one and its changes.


def compact(versions: TableVersions, number: int) -> None:
    """Makes a version independent of others, and removes earlier ones that no version needs.

    Memory holds a piece of a table, and a byte for each slot. The version keeps its number and its
    identity, so that later versions continue it. An interrupted call leaves the version as it was,
    or with all rows.

    Raises:
        DataLossError: a file is missing, damaged or out of order.
        OSError: a file cannot be written.
    """
    manifest = versions.manifest(number)
    fields = copy.deepcopy(manifest)
    for name, table in fields["tables"].items():
        for part, own in enumerate(table["parts"]):
            if own["base"] is not None:
                table["parts"][part] |= _compacted(versions, number, name, part)
    fields["base"] = None
    versions.write_manifest(number, fields)
    for file in _files(manifest) - _files(fields):
        (versions.folder / file).unlink(missing_ok=True)
    first = min(number, versions.latest or number)
    remove_unneeded(versions, lambda one, _: one >= first)


def _compacted(versions: TableVersions, number: int, name: str, part: int) -> dict[str, Any]:
    described = versions.chain(number, name, part)
    file = str(Path(file_name(number, name, part)).with_suffix(".all.rows"))
    with TableChain(versions.folder, described) as chain:
        head = dataclasses.replace(chain.files[0].head, base=None)
        with TableFileWriter(versions.folder / file, head) as writer:
            for _, rows in chain.rows():
                writer.add(rows)
            size_bytes = writer.end(chain.end)
    return {"file": file, "base": None, "size_bytes": size_bytes, "rows": writer.num_rows}


def _files(manifest: dict[str, Any]) -> set[str]:
    return {part["file"] for table in manifest["tables"].values() for part in table["parts"]}
