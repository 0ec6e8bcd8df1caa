"""Arrays that grow in place."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.parameter_server.server.tables import dirty_rows as growing_array
from stratagem.parameter_server.server.tables.dirty_rows import GrowingArray, most_rows_in_memory


def filled(num_rows: int, most_rows: int = 10_000) -> GrowingArray:
    growing = GrowingArray((2,), np.float32, most_rows)
    growing.grow(num_rows)
    growing.array[:num_rows] = np.arange(2 * num_rows).reshape(num_rows, 2)
    return growing


@pytest.mark.parametrize("copied_bytes", [0, 2**22])
def test_rows_stay_when_it_grows(monkeypatch, copied_bytes) -> None:
    monkeypatch.setattr(growing_array, "_COPIED_BYTES", copied_bytes)
    growing = filled(3)
    for num_rows in (3, 4, 1000, 10_000):
        growing.grow(num_rows)
        assert len(growing.array) >= num_rows
        np.testing.assert_array_equal(growing.array[:3], [[0, 1], [2, 3], [4, 5]])
    assert growing.row_bytes == 8


def test_large_array_is_reserved_once(monkeypatch) -> None:
    monkeypatch.setattr(growing_array, "_COPIED_BYTES", 800)
    growing = filled(100)
    growing.grow(101)
    reserved = growing.array
    assert len(reserved) == 10_000
    growing.grow(10_000)
    assert growing.array is reserved


def test_array_grows_by_copies_if_memory_cannot_be_reserved(monkeypatch) -> None:
    monkeypatch.setattr(growing_array, "_COPIED_BYTES", 800)
    growing = filled(100, 2**58)
    growing.grow(101)
    assert len(growing.array) == 200
    np.testing.assert_array_equal(growing.array[99], [198, 199])


def test_more_rows_than_fit_are_refused() -> None:
    growing = filled(3, 10)
    with pytest.raises(MemoryError, match=r"memory for 11 rows.\nExpected at most 10 rows"):
        growing.grow(11)
    with pytest.raises(MemoryError, match="memory for"):
        filled(2**57, 2**58)


def test_number_of_rows_that_fill_the_memory() -> None:
    assert most_rows_in_memory(1) == 2**31 - 1
    rows = most_rows_in_memory(2**20)
    with open("/proc/meminfo") as file:
        total_kib = int(file.readline().split()[1])
    assert rows == total_kib // 1024
