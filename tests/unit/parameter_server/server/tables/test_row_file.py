"""Records in a file, against a dictionary."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from stratagem.parameter_server.server.tables.disk_rows import RowFile

TYPE = np.dtype([("row", np.float32, (3,)), ("count", np.uint8)])


def write(file: RowFile, numbers: np.ndarray, value: float) -> None:
    records = file.empty(len(numbers))
    records["row"], records["count"] = value + numbers[:, None], 7
    file.write(numbers, records)


def test_records_are_those_of_a_dictionary(tmp_path) -> None:
    rng = np.random.default_rng(0)
    wanted: dict[int, float] = {}
    for _ in range(3):  # opened again
        with RowFile(tmp_path / "rows", TYPE) as file:
            for value in range(20):
                numbers = np.unique(rng.integers(0, 5000, 100))
                if value % 3 == 0:  # a run
                    numbers = np.arange(numbers[0], numbers[0] + 300)
                write(file, numbers, value)
                wanted |= dict.fromkeys(numbers.tolist(), value)
                numbers = np.unique(rng.integers(0, 60_000, 200))
                got = file.read(numbers)
                assert file.are_valid(numbers, got).all()
                is_written = np.array([one in wanted for one in numbers.tolist()])
                np.testing.assert_array_equal(file.are_written(got), is_written)
                values = np.array([wanted.get(one, 0.0) for one in numbers.tolist()])
                rows = np.where(is_written, numbers + values, 0)
                np.testing.assert_array_equal(got["row"], np.repeat(rows[:, None], 3, 1))
            file.sync()
    with RowFile(tmp_path / "rows", TYPE) as file:
        found: list[int] = []
        for numbers, records in file.scan():
            found += numbers[file.are_written(records)].tolist()
        assert found == sorted(wanted)
        assert file.size_bytes <= 2 * (tmp_path / "rows").stat().st_size


@pytest.mark.parametrize("is_moved", [False, True])
def test_damaged_and_moved_records_are_found(tmp_path, is_moved) -> None:
    path = tmp_path / "rows"
    numbers = np.arange(50)
    with RowFile(path, TYPE) as file:
        write(file, numbers, 0.0)
        size = file.record_bytes
        assert size == 24
        data = bytearray(path.read_bytes())
        if is_moved:
            data[7 * size : 8 * size] = data[9 * size : 10 * size]
        else:
            data[7 * size + 15] ^= 4
        path.write_bytes(data)
        are_valid = file.are_valid(numbers, file.read(numbers))
    assert np.flatnonzero(~are_valid).tolist() == [7]


def test_file_has_holes_and_no_other_user_reads_it(tmp_path) -> None:
    with RowFile(tmp_path / "rows", TYPE) as file:
        assert not len(file.read(np.arange(0)))
        assert not file.are_written(file.read(np.array([0, 10**6]))).any()
        write(file, np.array([10**6]), 1.0)
        assert file.size_bytes < 10**6
        assert (tmp_path / "rows").stat().st_mode & 0o777 == 0o600


def test_short_reads_and_writes_are_continued(tmp_path, monkeypatch) -> None:
    pread, pwrite = os.pread, os.pwrite
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 7), at))
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: pwrite(file, data[:5], at))
    with RowFile(Path(tmp_path, "rows"), TYPE) as file:
        write(file, np.array([1, 2, 9]), 0.5)
        got = file.read(np.array([1, 2, 9]))
        assert file.are_valid(np.array([1, 2, 9]), got).all()
        np.testing.assert_array_equal(got["row"][:, 0], [1.5, 2.5, 9.5])
