"""Records of fixed size in a file, by number, for many numbers per call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stratagem.closing import Closing
from stratagem.parameter_server.server.tables.key_hash import GOLDEN, mix64

_CHECK, _PAD = "check", "pad"
_CHUNK_BYTES = 2**22  # read at once by `scan`
_GROWTH = 1.25
_LEAST_GROWTH_BYTES = 2**20
_PAGE_BYTES = 4096


class RowFile(Closing):
    """File of records with the fields of `dtype`, each with a checksum.

    Numbers of a call are sorted and distinct. A number that was never written has a record of
    zeros. Records that were written since the last `sync` may be lost, or damaged, if the machine
    stops. Reads and writes may be made by several threads. A file that is removed can be read until
    nothing refers to it.

    Args:
        path: file, which is created if it does not exist.
        dtype: structured type of a record.
    """

    _file = -1

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        fields = [(name, dtype[name]) for name in dtype.names or ()]
        pad = -dtype.itemsize % 8
        self._names = list(dtype.names or ())
        self._dtype = np.dtype([(_CHECK, np.uint64), *fields, (_PAD, np.uint8, (pad,))])
        self.record_bytes = self._dtype.itemsize
        words = np.arange(self.record_bytes // 8 - 1, dtype=np.uint64)
        self._weights = mix64(words) | np.uint64(1)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        # Without it, the system reads more pages than are wanted.
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_RANDOM)
        self._end_bytes = os.fstat(self._file).st_size

    @property
    def size_bytes(self) -> int:
        """Disk space in use."""
        return os.fstat(self._file).st_blocks * 512

    def empty(self, count: int) -> np.ndarray:
        """Returns records of zeros, to be filled and written."""
        return np.zeros(count, self._dtype)

    def read(self, numbers: np.ndarray) -> np.ndarray:
        """Returns records, unchecked: see `are_valid`.

        All reads are announced first: the disk works on many of them at the same time.
        """
        if not len(numbers):
            return self.empty(0)
        parts = self._parts(numbers)
        for begin, size in parts:
            os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_WILLNEED)
        data = b"".join([self._read(begin, size) for begin, size in parts])
        return np.frombuffer(data, self._dtype)

    def write(self, numbers: np.ndarray, records: np.ndarray) -> None:
        """Writes records, made by `empty`.

        Raises:
            OSError: the disk is full, or fails. Some of the records may be written.
        """
        records[_CHECK] = self._checks(numbers, records)
        self._put(numbers, records)

    def erase(self, numbers: np.ndarray) -> None:
        """Writes records of zeros, as if none had been written."""
        self._put(numbers, self.empty(len(numbers)))

    def are_valid(self, numbers: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Returns False for each damaged record."""
        return (records[_CHECK] == self._checks(numbers, records)) | ~self.are_written(records)

    def are_written(self, records: np.ndarray) -> np.ndarray:
        """Returns False for each record that was never written, or erased."""
        return records[_CHECK] != 0

    def scan(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the numbers and records of the whole file, unchecked."""
        count = max(1, _CHUNK_BYTES // self.record_bytes)
        for first in range(0, self._end_bytes // self.record_bytes, count):
            begin = first * self.record_bytes
            ahead = begin + count * self.record_bytes
            os.posix_fadvise(self._file, ahead, count * self.record_bytes, os.POSIX_FADV_WILLNEED)
            end = min(ahead, self._end_bytes // self.record_bytes * self.record_bytes)
            records = np.frombuffer(self._read(begin, end - begin), self._dtype)
            yield np.arange(first, first + len(records)), records

    def sync(self) -> None:
        """Waits until all records are on disk."""
        os.fdatasync(self._file)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        self.close()

    def _put(self, numbers: np.ndarray, records: np.ndarray) -> None:
        if not len(numbers):
            return
        end_bytes = (int(numbers[-1]) + 1) * self.record_bytes
        if end_bytes > self._end_bytes:  # a file with holes, so that each read has its full size
            self._end_bytes = max(int(end_bytes * _GROWTH), _LEAST_GROWTH_BYTES)
            os.ftruncate(self._file, self._end_bytes)
        parts = self._parts(numbers)
        for begin, size in parts:  # a page that is written in part is read before
            if size < _PAGE_BYTES:
                os.posix_fadvise(self._file, begin, size, os.POSIX_FADV_WILLNEED)
        data = records.data.cast("B")
        place = 0
        for begin, size in parts:
            self._write(data[place : place + size], begin)
            place += size

    def _parts(self, numbers: np.ndarray) -> list[tuple[int, int]]:
        """Returns the byte offset and size of each run of consecutive numbers."""
        is_first = np.ones(len(numbers), np.bool_)
        np.not_equal(np.diff(numbers), 1, out=is_first[1:])
        firsts = np.flatnonzero(is_first)
        sizes = np.diff(firsts, append=len(numbers)) * self.record_bytes
        begins = numbers[firsts] * self.record_bytes
        return list(zip(begins.tolist(), sizes.tolist(), strict=True))

    def _read(self, begin: int, size: int) -> bytes:
        data = os.pread(self._file, size, begin)
        while len(data) < size:
            more = os.pread(self._file, size - len(data), begin + len(data))
            data += more or bytes(size - len(data))  # beyond the end
        return data

    def _write(self, data: memoryview, begin: int) -> None:
        while data:
            count = os.pwrite(self._file, data, begin)
            data, begin = data[count:], begin + count

    def _checks(self, numbers: np.ndarray, records: np.ndarray) -> np.ndarray:
        """Returns checksums, which depend on the place of a record and are never 0.

        Source: Carter and Wegman, Universal classes of hash functions (1979).
        """
        words = np.ascontiguousarray(records).view(np.uint64)
        words = words.reshape(len(records), self.record_bytes // 8)[:, 1:]
        sums = words @ self._weights + numbers.astype(np.uint64) * np.uint64(GOLDEN)
        return mix64(sums) | np.uint64(1)
