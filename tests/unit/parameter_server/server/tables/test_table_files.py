"""Files of tables: what was written, in place, and each kind of damage."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.parameter_server.server.tables.key_slots import SavedKeys, SlotOrder
from stratagem.parameter_server.server.tables.table_chains import TableChain
from stratagem.parameter_server.server.tables.table_files import (
    SavedRows,
    TableEnd,
    TableFile,
    TableFileWriter,
    TableHead,
)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
NONE = SavedKeys(*(np.empty(0, dtype) for dtype in (int, int, "u4", "u4", int)))
HEAD = TableHead("save 1", None, "a/b", 2, (3, 5), "bfloat16")


def keys_of(slots: list[int], freed: tuple[int, ...] = ()) -> SavedKeys:
    numbers = np.array(slots, np.int64)
    return SavedKeys(
        numbers,
        numbers * 7 - 2**62,
        (numbers + 1).astype(np.uint32),
        (numbers + 2).astype(np.uint32),
        np.array(freed, np.int64),
    )


def rows_of(slots: list[int], freed: tuple[int, ...] = (), scale: int = 1) -> SavedRows:
    keys = keys_of(slots, freed)
    value = np.arange(len(slots) * 15).reshape(-1, 3, 5).astype(BFLOAT16) + scale
    slot = np.arange(len(slots) * 15, dtype=np.float32).reshape(-1, 3, 5) * scale
    return SavedRows(keys, NONE, value, {"adam.v": slot})


def end_of(num_slots: int, free: tuple[int, ...] = ()) -> TableEnd:
    order = SlotOrder(num_slots, 4, None, np.array(free, np.int32))
    return TableEnd(9, order, SlotOrder(0, 0, 3, order.free[:0]), {"created": 1}, {"adam.v": 0.5})


def write(path: Path, parts: list[SavedRows], head: TableHead = HEAD, num_slots: int = 3000) -> int:
    with TableFileWriter(path, head) as writer:
        for part in parts:
            writer.add(part)
        return writer.end(end_of(num_slots, (2, 1)))


def assert_same(part: SavedRows, wanted: SavedRows) -> None:
    for one, other in ((part.rows, wanted.rows), (part.candidates, wanted.candidates)):
        for field in dataclasses.fields(one):
            np.testing.assert_array_equal(getattr(one, field.name), getattr(other, field.name))
    np.testing.assert_array_equal(part.value, wanted.value)
    assert part.value.dtype == BFLOAT16
    np.testing.assert_array_equal(part.slots["adam.v"], wanted.slots["adam.v"])


def test_file_has_what_was_written(tmp_path) -> None:
    path = tmp_path / "rows"
    parts = [rows_of([0, 5]), rows_of([7, *range(50, 2000)], (3, 4), 2), rows_of([], (1,))]
    size_bytes = write(path, [*parts, rows_of([])])
    assert path.stat().st_size == size_bytes
    assert [one.name for one in tmp_path.iterdir()] == ["rows"]
    with TableFile(path, size_bytes) as file:
        assert (file.head, file.end.version, file.end.initials) == (HEAD, 9, {"adam.v": 0.5})
        assert (file.end.rows.num_slots, file.end.rows.free.tolist()) == (3000, [2, 1])
        assert (file.end.candidates.swept, file.end.counters) == (3, {"created": 1})
        found = [*file.parts()]
        assert len(found) == 3
        for part, wanted in zip(found, parts, strict=True):
            assert_same(part, wanted)
            # a mapped file is an array of rows
            assert part.offset % HEAD.row_bytes == 0
            rows = np.frombuffer(file.map, f"V{HEAD.row_bytes}", len(file.map) // HEAD.row_bytes)
            first = part.offset // HEAD.row_bytes
            own = rows[first : first + len(part.value)].view(BFLOAT16).reshape(part.value.shape)
            np.testing.assert_array_equal(own, part.value)
        for part, wanted in zip(file.parts(is_reversed=True), reversed(parts), strict=True):
            assert_same(part, wanted)


def test_each_changed_or_missing_byte_is_found(tmp_path) -> None:
    path = tmp_path / "rows"
    size_bytes = write(path, [rows_of([0, 1])], num_slots=2)
    data = path.read_bytes()
    for place in range(0, size_bytes, 3):
        changed = bytearray(data)
        changed[place] ^= 4
        path.write_bytes(changed)
        with pytest.raises(DataLossError, match="rows cannot be read: "):
            TableFile(path)
    for length in range(0, size_bytes, 7):
        path.write_bytes(data[:length])
        with pytest.raises(DataLossError, match=f"it has {length} bytes and not {size_bytes}"):
            TableFile(path, size_bytes)
        with pytest.raises(DataLossError, match="rows cannot be read: "):
            TableFile(path)
    path.write_bytes(b"stratagem table 9\n" + data[18:])
    with pytest.raises(DataLossError, match="it is not a saved table of this format"):
        TableFile(path)
    path.unlink()
    with pytest.raises(DataLossError, match="rows cannot be read: it is missing"):
        TableFile(path)


def test_records_in_a_wrong_order_are_found(tmp_path) -> None:
    path = tmp_path / "rows"
    write(path, [rows_of([0, 1])])
    data = path.read_bytes()
    path.write_bytes(data[:18] + data[18:] + data[18:])
    with pytest.raises(DataLossError, match="invalid contents"):
        [*TableFile(path).parts()]
    path.write_bytes(data[:18])
    with pytest.raises(DataLossError, match="invalid contents"):
        TableFile(path)


def test_writer_that_fails_leaves_nothing(tmp_path) -> None:
    damaged = dataclasses.replace(rows_of([0]), slots={"adam.v": np.array([None])})
    with TableFileWriter(tmp_path / "rows", HEAD) as writer:
        writer.add(rows_of([0]))
        with pytest.raises(TypeError, match="references"):
            writer.add(damaged)
    assert not [*tmp_path.iterdir()]


def test_chain_has_each_slot_once(tmp_path) -> None:
    changes = dataclasses.replace(HEAD, save="save 2", base="save 1")
    first = write(tmp_path / "1", [rows_of([*range(10)]), rows_of([2, 3], (9,), 5)])
    second = write(tmp_path / "2", [rows_of([3, 11], (0,), 7), rows_of([4], (11,), 8)], changes)
    files = [("2", second, "save 2"), ("1", first, "save 1")]
    with TableChain(tmp_path, {"files": files, "buckets": [5, 2]}) as chain:
        found: dict[int, float] = {}
        for _, part in chain.rows():
            for slot, row in zip(part.rows.slots.tolist(), part.value[:, 0, 0], strict=True):
                assert slot not in found
                found[slot] = float(row)
        assert found == {4: 8, 3: 7, 2: 5, 1: 16, **{slot: 15 * slot + 1 for slot in range(5, 9)}}
        assert chain.buckets == range(5, 7)
        assert chain.end.version == 9


def test_chain_out_of_order(tmp_path) -> None:
    changes = dataclasses.replace(HEAD, save="save 2", base="save 1")
    sizes = write(tmp_path / "1", [rows_of([0])]), write(tmp_path / "2", [rows_of([1])], changes)
    one, two = ("1", sizes[0], "save 1"), ("2", sizes[1], "save 2")
    for files, damaged in (
        ([two], "2"),  # a full version is missing
        ([one, two], "2"),
        ([("1", sizes[0], "save 2"), one], "1"),
        ([two, ("1", sizes[0], "save 0")], "1"),
        ([two, ("3", sizes[0], "save 1")], "3"),
    ):
        with pytest.raises(DataLossError, match=f"The saved table {tmp_path}/{damaged} cannot"):
            TableChain(tmp_path, {"files": files, "buckets": [0, 1]})
    with pytest.raises(DataLossError, match="does not continue this one"):
        TableChain(tmp_path, {"files": [two, two], "buckets": [0, 1]})
    with pytest.raises(DataLossError, match="changes of another version, which is not there"):
        TableChain(tmp_path, {"files": [two], "buckets": [0, 1]})
