"""What has changed of a shard, and what a journal has of it."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.parameter_server.server import shards
from stratagem.parameter_server.server.shards import Shard, ShardSpec, made_in_pieces


def table() -> Shard:
    spec = ShardSpec("table", (10, 2), "float32", has_rows=True)
    shard = Shard(spec, np.arange(20, dtype=np.float32).reshape(10, 2))
    shard.slots["m"] = -shard.value
    return shard


def whole() -> Shard:
    return Shard(ShardSpec("v", (3,), "float32"), np.arange(3, dtype=np.float32))


def test_new_shards_have_changed_and_then_only_what_is_marked() -> None:
    shard = table()
    marks = shard.take_marks()
    assert marks is not None
    assert marks.all()
    assert shard.take_marks() is None
    shard.mark(np.array([7, 2]))
    marks = shard.take_marks()
    assert marks is not None
    assert np.flatnonzero(marks).tolist() == [2, 7]
    shard.mark(np.array([1]))
    shard.put_back(marks)
    assert shard.marked_bytes == 3 * 2 * 2 * 4
    part = shard.saved(shard.take_marks())
    assert part.rows is not None
    assert part.rows.tolist() == [1, 2, 7]
    np.testing.assert_array_equal(part.value, shard.value[[1, 2, 7]])
    np.testing.assert_array_equal(part.slots["m"], -shard.value[[1, 2, 7]])


def test_rows_that_were_saved_do_not_change_with_the_table() -> None:
    shard = table()
    part = shard.saved(shard.take_marks())
    before = shard.value.copy()
    shard.value[:] = 0
    np.testing.assert_array_equal(part.value, before)


def test_whole_shards_change_as_one_and_are_saved_without_a_copy() -> None:
    shard = whole()
    shard.take_marks()
    assert shard.take_marks() is None
    shard.mark(np.array([2]))
    assert shard.take_marks() is not None
    assert shard.marked_bytes == 0
    part = shard.saved()
    assert part.rows is None
    assert part.value is shard.value


@pytest.mark.parametrize("piece_bytes", [1, 50, 2**24])
def test_pieces_are_all_rows(monkeypatch, piece_bytes) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    shard = table()
    restored = Shard(shard.spec, np.zeros((10, 2), np.float32))
    rows = []
    for part in shard.pieces():
        assert part.rows is not None
        rows += part.rows.tolist()
        restored.restore(part)
    assert rows == list(range(10))
    np.testing.assert_array_equal(restored.value, shard.value)
    np.testing.assert_array_equal(restored.slots["m"], shard.slots["m"])


@pytest.mark.parametrize("piece_bytes", [1, 50, 2**24])
def test_pieces_are_the_marked_rows(monkeypatch, piece_bytes) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    marks = np.zeros(10, np.bool_)
    marks[[0, 7, 9]] = True
    parts = list(table().pieces(marks))
    assert np.concatenate([part.rows for part in parts]).tolist() == [0, 7, 9]
    assert np.concatenate([part.value for part in parts]).tolist() == [[0, 1], [14, 15], [18, 19]]


@pytest.mark.parametrize("piece_bytes", [1, 50, 2**24])
def test_initial_value_is_made_in_pieces(monkeypatch, piece_bytes) -> None:
    monkeypatch.setattr(shards, "_PIECE_BYTES", piece_bytes)
    asked = []

    def rows(first: int, count: int) -> np.ndarray:
        asked.append((first, count))
        return np.arange(2 * first, 2 * (first + count)).reshape(count, 2)

    value = made_in_pieces(ShardSpec("t", (10, 2), "float32", first_row=5), rows)
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, np.arange(10, 30).reshape(10, 2))
    assert all(count * 8 <= max(piece_bytes, 8) for _, count in asked)
    assert sum(count for _, count in asked) == 10


def test_initial_value_of_another_shape_is_refused() -> None:
    spec = ShardSpec("t", (10, 2), "float32")
    with pytest.raises(ValueError, match=r"10 rows of the initial value of 't' were made with"):
        made_in_pieces(spec, lambda first, count: np.zeros((count, 1)))


def test_whole_shard_is_restored_as_its_own() -> None:
    shard, restored = whole(), whole()
    shard.value, shard.slots = np.full(3, 7.0, np.float32), {"m": np.ones(3, np.float32)}
    restored.restore(shard.saved())
    shard.value[:] = 0
    np.testing.assert_array_equal(restored.value, 7)
    np.testing.assert_array_equal(restored.slots["m"], 1)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 2), "rows 0 to 2 of this shard"), ((0, 2), "no rows: this shard has none")],
)
def test_row_that_is_not_there_is_refused(shape, expected) -> None:
    shard = Shard(ShardSpec("a", shape, "float32", has_rows=True), np.zeros(shape, np.float32))
    with pytest.raises(
        IndexError, match=f"Rows 3 to 3 of 'a' were requested.\\nExpected {expected}."
    ):
        shard.require(np.array([3]))
    shard.require(np.array([], np.int32))
