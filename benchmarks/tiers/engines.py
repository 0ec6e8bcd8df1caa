"""Storage engines of fixed-size rows with one interface: a file, RocksDB and LMDB.

Rows have a number, as in a server: the index of keys is in memory whatever the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from stratagem.parameter_server.server.tables.disk_rows import RowFile

__all__ = ["ENGINES", "RowStorage"]

_CACHE_BYTES = 2**26
_MAP_BYTES = 2**34


class RowStorage(Protocol):
    """Rows by number. Numbers of a call are sorted and distinct."""

    def get(self, numbers: np.ndarray) -> np.ndarray: ...
    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None: ...
    def delete(self, numbers: np.ndarray) -> None: ...
    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]: ...
    def sync(self) -> None: ...
    @property
    def size_bytes(self) -> int: ...
    def close(self) -> None: ...


class _File:
    """The file of the servers: a row is at its number times its size."""

    def __init__(self, folder: Path, width: int) -> None:
        dtype = np.dtype([("row", np.float32, (width,))])
        self._file = RowFile(folder / "rows", dtype)
        self.close, self.sync = self._file.close, self._file.sync

    def get(self, numbers: np.ndarray) -> np.ndarray:
        records = self._file.read(numbers)
        assert self._file.are_valid(numbers, records).all()
        return records["row"]

    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        records = self._file.empty(len(numbers))
        records["row"] = rows
        self._file.write(numbers, records)

    def delete(self, numbers: np.ndarray) -> None:
        self._file.erase(numbers)

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for numbers, records in self._file.scan():
            yield numbers, records["row"]

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes


class _RocksDB:
    """RocksDB by rocksdict. Without its log: a server has a journal."""

    def __init__(self, folder: Path, width: int) -> None:
        import rocksdict

        self._rocks: Any = rocksdict
        self._folder, self._width = folder, width
        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)  # noqa: FBT003
        options.set_compression_type(rocksdict.DBCompressionType.none())
        options.set_max_background_jobs(2)
        table = rocksdict.BlockBasedOptions()
        table.set_block_cache(rocksdict.Cache(_CACHE_BYTES))
        table.set_bloom_filter(10, block_based=False)
        options.set_block_based_table_factory(table)
        self._db = rocksdict.Rdict(str(folder / "rocks"), options)
        self._unlogged = rocksdict.WriteOptions()
        self._unlogged.disable_wal = True
        self.close = self._db.close

    def get(self, numbers: np.ndarray) -> np.ndarray:
        found = self._db.get(_keys(numbers))
        return np.frombuffer(b"".join(found), np.float32).reshape(-1, self._width)

    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key, row in zip(_keys(numbers), rows, strict=True):
            batch.put(key, row.tobytes())
        self._db.write(batch, self._unlogged)

    def delete(self, numbers: np.ndarray) -> None:
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key in _keys(numbers):
            batch.delete(key)
        self._db.write(batch, self._unlogged)

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for key, row in self._db.items():
            yield np.frombuffer(key, ">u8"), np.frombuffer(row, np.float32)[None]

    def sync(self) -> None:
        self._db.flush()

    @property
    def size_bytes(self) -> int:
        return _files_bytes(self._folder)


class _LMDB:
    """LMDB: a B+ tree in a memory map."""

    def __init__(self, folder: Path, width: int) -> None:
        import lmdb

        self._folder, self._width = folder, width
        self._db: Any = lmdb.open(
            str(folder / "lmdb"), map_size=_MAP_BYTES, readahead=False, sync=False, lock=False
        )
        self.close = self._db.close

    def get(self, numbers: np.ndarray) -> np.ndarray:
        with self._db.begin(buffers=True) as reading:
            found = [reading.get(key) for key in _keys(numbers)]
            return np.frombuffer(b"".join(found), np.float32).reshape(-1, self._width)

    def put(self, numbers: np.ndarray, rows: np.ndarray) -> None:
        with self._db.begin(write=True) as writing:
            items = [(k, r.tobytes()) for k, r in zip(_keys(numbers), rows, strict=True)]
            writing.cursor().putmulti(items)

    def delete(self, numbers: np.ndarray) -> None:
        with self._db.begin(write=True) as writing:
            for key in _keys(numbers):
                writing.delete(key)

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        with self._db.begin(buffers=True) as reading:
            for key, row in reading.cursor():
                yield np.frombuffer(key, ">u8"), np.frombuffer(row, np.float32)[None]

    def sync(self) -> None:
        self._db.sync(True)  # noqa: FBT003

    @property
    def size_bytes(self) -> int:
        return _files_bytes(self._folder)


def _keys(numbers: np.ndarray) -> list[bytes]:
    data = numbers.astype(">u8").tobytes()
    return [data[place : place + 8] for place in range(0, len(data), 8)]


def _files_bytes(folder: Path) -> int:
    return sum(one.stat().st_blocks * 512 for one in folder.rglob("*") if one.is_file())


ENGINES: dict[str, Callable[[Path, int], RowStorage]] = {
    "file": _File,
    "RocksDB": _RocksDB,
    "LMDB": _LMDB,
}
