"""Keys and rows in a folder, and columns that are added later."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stratagem.errors import DataLossError, UnavailableError
from stratagem.parameter_server.server.tables.disk_rows import DiskRows
from stratagem.parameter_server.server.tables.key_slots import SavedKeys

NONE = np.empty(0, np.int64)


def keys_of(slots: list[int], freed: list[int] | None = None) -> SavedKeys:
    used = np.array(slots)
    seen = np.full(len(used), 3, np.uint32)
    return SavedKeys(used, used * 10, seen, seen + np.uint32(1), np.array(freed or NONE))


def value(slots: list[int], number: float) -> np.ndarray:
    return np.full((len(slots), 2), number, np.float32)


def column(rows: DiskRows, name: str, slots: list[int]) -> list[float]:
    fetched = rows.read(np.array(slots))
    assert fetched.are_valid().all()
    values = np.full((len(slots), 2), -1, np.float32)
    fetched.fill(name, values)
    return values[:, 0].tolist()


def test_keys_and_columns_are_there_when_the_folder_is_opened_again(tmp_path) -> None:
    folder = tmp_path / "t"
    with DiskRows(folder) as rows:
        rows.write((1, 2), keys_of([1, 4, 6]), {"value": value([1, 4, 6], 5)})
        one = value([4], 6)
        rows.write((1, 3), keys_of([4], [6]), {"value": one, "v#1": one + 1})
        rows.write((1, 3), keys_of([9]), {"v#1": value([9], 3)})  # the other was dropped
        rows.sync()
        assert rows.columns == ["value", "v#1"]
        assert rows.size_bytes > 0
        rows_id = rows.rows_id
    with DiskRows(folder, rows_id) as rows:
        assert rows.position == (1, 3)
        assert column(rows, "value", [0, 1, 4, 9]) == [-1, 5, 6, 0]
        assert column(rows, "v#1", [1, 4, 9]) == [-1, 7, 3]
        (found,) = [keys for keys, _ in rows.scan()]
        assert found.slots.tolist() == [1, 4, 9]
        assert found.keys.tolist() == [10, 40, 90]
        assert found.counts.tolist() == [4, 4, 4]
        assert rows.num_read == 7
        rows.remove()
    assert not tmp_path.exists()


def test_folder_of_another_journal_and_folder_in_use_are_refused(tmp_path, monkeypatch) -> None:
    folder = tmp_path / "t"
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    with DiskRows(folder) as rows, pytest.raises(UnavailableError, match="is in use by process"):
        DiskRows(folder, rows.rows_id)
    with pytest.raises(DataLossError, match="its rows are of another journal"):
        DiskRows(folder, "other")
    with pytest.raises(DataLossError, match="cannot be used: it has no valid rows") as raised:
        DiskRows(Path(tmp_path, "u"), "other")
    assert raised.value.__cause__ is not None
