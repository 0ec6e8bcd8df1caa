"""`Tables`: read-only lookups in published tables, without servers."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from stratagem.errors import DataLossError, NotFoundError, check_number, explain
from stratagem.parameter_server.server.tables.row_formats import RowFormat, buckets_of
from stratagem.parameter_server.server.tables.saved_tables import TableFile, TableVersions
from stratagem.parameter_server.server.tables.table_chains import TableChain
from stratagem.parameter_server.server.tables.table_options import RowInitializer
from stratagem.resources import Closing

# Keys of published tables in memory, and their rows in mapped files.

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


@dataclasses.dataclass(frozen=True)
class ServedPart:
    """A shard of a table in one version: a segment with all rows, and those with changes since.

    `save` is the identity of the version; `slots` are for the next version.
    """

    save: str
    buckets: range
    segments: tuple[_Segment, ...]
    slots: _Slots

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


_logger = logging.getLogger(__name__)
# A version may be compacted, and its old files removed, while it is opened.
_ATTEMPTS = 3


@dataclasses.dataclass(frozen=True)
class _ServedTable:
    """A table of one version."""

    format: RowFormat
    initializer: RowInitializer
    parts: list[ServedPart]

    def rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns the rows of keys, the initial one for an unknown key."""
        stored = self.format
        rows = np.empty((len(keys), *stored.stored_shape), stored.stored_dtype)
        is_known = np.zeros(len(keys), np.bool_)
        buckets = buckets_of(keys)
        for part in self.parts:
            own = (buckets >= part.buckets.start) & (buckets < part.buckets.stop)
            places = np.flatnonzero(own)
            found = part.rows(keys[places], stored.stored_dtype, stored.stored_shape)
            for some, values in found:
                rows[places[some]] = values
                is_known[places[some]] = True
        unknown = ~is_known
        rows[unknown] = self.initializer.stored(keys[unknown], stored)
        return stored.expanded(rows)


class Tables(Closing):
    """Rows of the published version of saved tables, read from files that are mapped into memory.

    Needs neither servers nor devices. A thread looks for a newer version every `poll_s` seconds.
    Lookups use the version that was complete when they began. Rows stay on disk until they are
    looked up; keys are in memory, with 25 bytes each.

    Args:
        folder: folder that `sg.embedding.publish` writes.
        num_versions: number of versions that stay loaded, at least 1.
        poll_s: seconds between looks for a new version; None to look only in `refresh`.

    Raises:
        sg.errors.NotFoundError: nothing was published, or the published version does not exist.
        sg.errors.DataLossError: a file is missing or damaged. The error names it.
        ValueError: `num_versions` is below 1.

    Example:
        >>> import tempfile
        >>> from stratagem.parameter_server.client.shard_layout import layout_of_keys
        >>> from stratagem.parameter_server.keras.update_rule import KerasUpdate
        >>> with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        ...     client = strategy.placement.remote.variables.client
        ...     layout = layout_of_keys("users", (2,), "float32", [0])
        ...     _ = client.create(layout, None)
        ...     client.set_rule(KerasUpdate(keras.optimizers.SGD(1.0)), ["users"])
        ...     with tempfile.TemporaryDirectory() as folder, strategy.scope():
        ...         first = sg.embedding.publish(folder)
        ...         with sg.embedding.Tables(folder, poll_s=None) as tables:
        ...             gradient = -np.ones((1, 2), np.float32)
        ...             _ = client.push({}, {"users": (np.array([2**40]), gradient)})
        ...             second = sg.embedding.publish(folder)
        ...             before = tables.lookup("users", [2**40]).tolist()
        ...             _ = tables.refresh()
        ...             after = tables.lookup("users", [2**40, 5]).tolist()
        ...         sg.embedding.rollback(folder, first)
        ...         with sg.embedding.Tables(folder) as tables:
        ...             version = tables.version
        >>> before, after, version
        ([[0.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]], 1)

    Source: specific to Stratagem.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        num_versions: int = 2,
        poll_s: float | None = 1.0,
    ) -> None:
        check_number("Tables", num_versions=num_versions)
        self._saved = TableVersions(folder)
        self._num_versions = num_versions
        self._loading = threading.Lock()
        self._loaded: dict[int, Mapping[str, _ServedTable]] = {}
        self._parts: dict[tuple[str, int], ServedPart] = {}
        self._version = 0
        self._is_over = threading.Event()
        self.refresh()
        self._thread: threading.Thread | None = None
        if poll_s is not None:
            self._thread = threading.Thread(
                target=self._poll, args=(poll_s,), name="published-tables", daemon=True
            )
            self._thread.start()

    @property
    def version(self) -> int:
        """Number of the version that lookups use."""
        return self._version

    @property
    def versions(self) -> list[int]:
        """Numbers of the versions that are loaded, in order."""
        return sorted(self._loaded)

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return list(self._loaded[self._version])

    def lookup(self, name: str, keys: Any, *, version: int | None = None) -> np.ndarray:
        """Returns rows by key. A key without a row has its initial value.

        Args:
            name: name of the table.
            keys: int64 keys of any shape, or uint32 pairs of `sg.embedding.keys`.
            version: one of `versions`; None for the newest.

        Returns:
            A new array of shape (*shape of keys, *shape of a row).

        Raises:
            KeyError: no such table, or the version is not loaded.
            TypeError: keys of another dtype.

        Example:
            See the class.

        Source: specific to Stratagem.
        """
        number = self._version if version is None else version
        tables = self._loaded.get(number, {})
        if name not in tables:
            raise KeyError(
                explain(
                    f"Table {name!r} of version {number} was looked up.",
                    expected=f"one of the tables {self.names} of the versions {self.versions}.",
                    fix="pass a larger num_versions to keep more versions.",
                )
            )
        table, numbers = tables[name], np.asarray(keys)
        if numbers.dtype == np.uint32 and numbers.shape[-1:] == (2,):
            numbers = np.ascontiguousarray(numbers).view(np.int64)[..., 0]
        if (numbers.size and numbers.dtype.kind not in "iu") or numbers.dtype == np.uint64:
            raise TypeError(
                explain(
                    f"Keys of dtype {numbers.dtype} were looked up in {name!r}.",
                    expected="int64 keys, or pairs from sg.embedding.keys.",
                    fix="convert them with sg.embedding.keys, as in training.",
                )
            )
        flat = np.ascontiguousarray(numbers, np.int64).reshape(-1)
        return table.rows(flat).reshape(*numbers.shape, *table.format.row_shape)

    def refresh(self) -> bool:
        """Loads the published version if it is another one.

        Returns:
            True if lookups now use another version.

        Raises:
            sg.errors.NotFoundError: nothing was published, or the version does not exist.
            sg.errors.DataLossError: a file is missing or damaged. Lookups keep their version.

        Example:
            See the class.

        Source: specific to Stratagem.
        """
        with self._loading:
            for attempt in range(_ATTEMPTS):
                latest = self._saved.latest
                if latest is None:
                    raise _nothing_published(self._saved)
                number = self._saved.chosen(latest)
                if number == self._version:
                    return False
                try:
                    if number not in self._loaded:
                        self._loaded = {**self._loaded, number: self._opened(number)}
                except DataLossError:
                    if attempt + 1 == _ATTEMPTS:
                        raise
                    continue
                self._version = number
                self._drop_old()
                return True
        return False

    def close(self) -> None:
        """Ends the thread, and drops all versions."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        self._loaded = {}
        self._parts.clear()

    def _poll(self, poll_s: float) -> None:
        reported = ""
        while not self._is_over.wait(poll_s):
            try:
                self.refresh()
            except (DataLossError, NotFoundError, OSError) as error:
                if str(error) != reported:
                    _logger.warning("Lookups stay at version %d: %s", self._version, error)
                reported = str(error)

    def _opened(self, number: int) -> dict[str, _ServedTable]:
        manifest = self._saved.manifest(number)
        opened: dict[str, _ServedTable] = {}
        parts: dict[tuple[str, int], ServedPart] = {}
        for name, table in manifest["tables"].items():
            own: list[ServedPart] = []
            for part in range(len(table["parts"])):  # only files that are new are read
                described = self._saved.chain(number, name, part)
                own.append(_served(self._saved, described, self._parts.get((name, part))))
                parts[name, part] = own[-1]
            opened[name] = _ServedTable(
                RowFormat.of(tuple(table["row_shape"]), table["dtype"], table["options"]),
                RowInitializer(**(table["options"].get("initializer") or {})),
                own,
            )
        self._parts = parts
        return opened

    def _drop_old(self) -> None:
        others = sorted(self._loaded.keys() - {self._version})
        kept = {self._version, *others[len(others) - self._num_versions + 1 :]}
        self._loaded = {number: one for number, one in self._loaded.items() if number in kept}


def _nothing_published(saved: TableVersions) -> NotFoundError:
    return NotFoundError(
        explain(
            f"No version of tables was published in {saved.folder}.",
            expected="a folder with a published version.",
            fix="call sg.embedding.publish(folder) in the training program first, or "
            "sg.embedding.rollback(folder, version) to publish a saved version.",
        )
    )
