"""Rows that servers hold in bfloat16 and int8: rounding, and tables that are trained with it."""

from __future__ import annotations

import math
import os
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from stratagem.parameter_server.server.tables import row_formats
from stratagem.parameter_server.server.tables.row_formats import RowFormat, mix64
from tests.unit.parameter_server.server.tables.scalar_hash import (
    GOLDEN,
    KEYS,
    MASK,
    mixed,
    seeded_key,
)
from tests.unit.parameter_server.server.tables.test_keyed_shard import DIM, assert_same, made, push
from tests.unit.parameter_server.server.tables.test_tiered_journal import Server, started

WIDTH = 5
BFLOAT16 = RowFormat((WIDTH,), "float32", "bfloat16", 7)
INT8 = RowFormat((WIDTH,), "float32", "int8", 7)
BOTH = pytest.mark.parametrize("format", [BFLOAT16, INT8], ids=["bfloat16", "int8"])
DTYPES = pytest.mark.parametrize("storage_dtype", ["bfloat16", "int8"])
ROW = [0.3, -0.0017, 1e-30, 127 / 128, -0.7]


def words(key: int, count: int, seed: int) -> list[int]:
    """The 64-bit numbers of a row's update, one at a time."""
    start = seeded_key(key, seed ^ row_formats._STREAM) ^ mixed(count * GOLDEN & MASK)
    return [mixed(start + place * GOLDEN & MASK) for place in range(1, 5)]


def scale_of(row: list[float]) -> Fraction:
    """The smallest number of 17 bits that has a row within 127 of it."""
    wanted = max(abs(Fraction(float(np.float32(number)))) for number in row) / 127
    unit = Fraction(2) ** (math.floor(math.log2(wanted)) - 16)
    return math.ceil(wanted / unit) * unit


def neighbors(value: Fraction, format: RowFormat, row: list[float]) -> tuple[Fraction, Fraction]:
    """The stored numbers on both sides of a value, in exact arithmetic."""
    if format is INT8:
        step = scale_of(row)
    else:
        step = Fraction(2) ** (math.floor(math.log2(abs(value))) - 7)
    low = math.floor(value / step) * step
    return low, low + step


@BOTH
def test_the_mean_of_rounded_numbers_is_the_exact_one(format) -> None:
    num_rows = 40_000
    keys = np.random.default_rng(0).integers(-(2**62), 2**62, num_rows)
    rows = np.tile(np.array(ROW, np.float32), (num_rows, 1))
    counts = np.arange(num_rows, dtype=np.uint64)
    for own_keys, own_counts in ((keys, counts), (keys, counts * 0), (keys * 0, counts)):
        found = format.expanded(format.stored(rows, own_keys, own_counts))
        for column, value in enumerate(rows[0]):
            exact = Fraction(float(value))
            low, high = neighbors(exact, format, ROW)
            low32, high32 = np.float32(float(low)), np.float32(float(high))
            assert {*found[:, column].tolist()} <= {float(low32), float(high32)}
            share = float((exact - low) / (high - low))
            mean = np.mean(found[:, column] == high32)
            error = math.sqrt(share * (1 - share) / num_rows)
            assert abs(mean - share) <= 4 * error + 2**-24
    columns = found[:, [0, 1, 4]] > rows[:, [0, 1, 4]]  # columns are rounded independently
    np.testing.assert_allclose(np.corrcoef(columns.T), np.eye(3), atol=4 / math.sqrt(num_rows))


def test_bits_are_hashes_of_seed_key_count_and_column() -> None:
    keys, count = np.array(KEYS), 3
    rows = np.array([ROW] * len(keys), np.float32)
    counts = np.full(len(keys), count, np.uint64)
    stored, int8 = BFLOAT16.stored(rows, keys, counts), INT8.stored(rows, keys, counts)
    for key, half, whole in zip(KEYS, stored, int8, strict=True):
        own = words(key, count, 7)
        for column, number in enumerate(np.array(ROW, np.float32)):
            added = own[column // 4] >> 16 * (column % 4) & 0xFFFF
            assert half[column] == (int(number.view(np.uint32)) + added) >> 16
            drawn = (own[column // 2] >> 32 * (column % 2) & 0xFFFFFFFF) >> 8
            exact = Fraction(float(number)) / scale_of(ROW)
            up = Fraction(drawn, 2**24) < exact - math.floor(exact)
            assert whole[4 + column] == math.floor(exact) + up
    others = [RowFormat((WIDTH,), "float32", "int8", 8).stored(rows, keys, counts)]
    others += [INT8.stored(rows, keys, counts + 1), INT8.stored(rows, keys[::-1], counts)]
    assert all((int8 != other).any() for other in others)
    order = np.random.default_rng(0).permutation(len(keys))  # neither other rows nor their order
    np.testing.assert_array_equal(INT8.stored(rows[order], keys[order], counts), int8[order])


def test_rounding_to_the_nearest_and_of_many_rows_in_parts(monkeypatch) -> None:
    rows = np.random.default_rng(0).normal(size=(1000, WIDTH)).astype(np.float32)
    nearest = rows.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(BFLOAT16.expanded(BFLOAT16.stored(rows)), nearest)
    found = INT8.expanded(INT8.stored(rows))
    steps = np.array([[float(scale_of(row))] for row in rows.tolist()])
    np.testing.assert_array_equal(found, (np.round(rows / steps) * steps).astype(np.float32))
    keys, counts = np.arange(1000), np.arange(1000, dtype=np.uint64)
    wanted = [one.stored(rows, keys, counts) for one in (BFLOAT16, INT8)]
    monkeypatch.setattr(row_formats, "_MOST_NUMBERS", 30 * WIDTH)
    for one, stored in zip((BFLOAT16, INT8), wanted, strict=True):
        np.testing.assert_array_equal(one.stored(rows, keys, counts), stored)


@BOTH
def test_numbers_that_a_format_has_are_not_rounded_and_the_smallest_stay_small(format) -> None:
    rows = np.random.default_rng(0).integers(-127, 128, (500, WIDTH)).astype(np.float32)
    rows[:, 2] = 127
    rows *= np.float32(2.0) ** np.arange(-250, 250)[:, None].clip(-110, 110)
    rows[0] = 0
    keys, counts = np.arange(500), np.arange(500, dtype=np.uint64)
    np.testing.assert_array_equal(format.expanded(format.stored(rows, keys, counts)), rows)
    rows = np.array([[1e-45, -1e-45, 0, 0, 0], [1e-37, 0, 0, 0, 0]], np.float32)
    found = INT8.expanded(INT8.stored(rows, keys[:2], counts[:2] * 0))
    np.testing.assert_allclose(found, rows, atol=float(np.finfo(np.float32).tiny), rtol=0)


def test_row_that_an_update_leaves_stays() -> None:
    rows = np.random.default_rng(0).normal(size=(500, WIDTH)).astype(np.float32)
    keys, counts = np.arange(500), np.zeros(500, np.uint64)
    first = INT8.stored(rows, keys, counts)
    kept = np.abs(first[:, 4:].astype(int)).max(axis=1) == 127
    assert kept.mean() > 0.99
    for count in (1, 2):
        again = INT8.stored(INT8.expanded(first), keys, counts + np.uint64(count))
        np.testing.assert_array_equal(again[kept], first[kept])


@BOTH
def test_infinite_and_undefined_numbers(format) -> None:
    row = [np.inf, -np.inf, np.nan, 1.0, 0.0]
    bits = np.array([[0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001, 0, 0]], np.uint32)  # NaNs
    rows = np.concatenate([np.array([row, [1, 2, 3, 4, 5]], np.float32), bits.view(np.float32)])
    found = format.expanded(format.stored(rows, np.arange(3), np.zeros(3, np.uint64)))
    np.testing.assert_allclose(found[1], [1, 2, 3, 4, 5], atol=0 if format is BFLOAT16 else 5 / 127)
    assert np.isnan(found[2, :3]).all()
    np.testing.assert_array_equal(found[0], row if format is BFLOAT16 else [np.nan] * WIDTH)


def test_sizes_and_shapes_of_stored_rows() -> None:
    for shape in ((), (3, 2)):
        sizes = [
            RowFormat(shape, "float32", storage).stored_bytes
            for storage in (None, "bfloat16", "int8")
        ]
        width = math.prod(shape)
        assert sizes == [4 * width, 2 * width, width + 4]
        for storage in (None, "bfloat16", "int8"):
            format = RowFormat(shape, "float32", storage)
            rows = np.ones((7, *shape), np.float32)
            np.testing.assert_allclose(format.expanded(format.stored(rows)), rows, rtol=2e-5)
            assert format.stored(rows).shape == (7, *format.stored_shape)
    plain = RowFormat((2,), "float64")
    assert plain.is_plain
    assert plain.stored_dtype == np.float64


@DTYPES
def test_updates_are_computed_in_float32_and_stored_with_their_number(storage_dtype) -> None:
    store, reference = made(storage_dtype=storage_dtype), made()
    format = RowFormat((DIM,), "float32", storage_dtype, 5)
    keys = np.arange(40)
    start = format.stored(reference.pull_rows("t", keys), keys, np.zeros(40, np.uint64))
    np.testing.assert_array_equal(store.pull_rows("t", keys), format.expanded(start))
    np.testing.assert_array_equal(store.pull_rows("t", keys, are_expanded=False), start)
    rows, slots = format.expanded(start), np.full((40, DIM), 0.25, np.float32)
    for count, gradient in enumerate((0.5, -0.25, 2.0), start=1):
        push(store, keys, gradient)
        slots = 0.5 * slots + gradient
        exact = (rows - 0.1 * slots).astype(np.float32)
        rows = format.expanded(format.stored(exact, keys, np.full(40, count, np.uint64)))
        np.testing.assert_array_equal(store.pull_rows("t", keys), rows)
        np.testing.assert_array_equal(store.pull_rows("t:v", keys), slots)
    assert store.pull(["t"])[0].dtype == np.float32
    push(store, np.arange(5000))
    others = store.tables["t"]["bytes"] - 5000 * (8 + 16)  # the slot is float32
    assert 25 * 5000 < others < 50 * 5000


@DTYPES
def test_rows_on_disk_and_of_a_journal_are_those_in_memory(
    tmp_path, monkeypatch, storage_dtype
) -> None:
    for sync in ("fsync", "fdatasync"):  # no test stops the machine
        monkeypatch.setattr(os, sync, lambda file: None)
    one = Server(tmp_path, storage_dtype=storage_dtype)
    for steps in (range(20), range(20, 25)):
        one.run(steps)
        assert one.state.store.tables["t"]["disk_reads"] > 0
        assert_same(one.state.store, one.reference)
        one.kill()
        one.state, one.journal = started(tmp_path, one.options)
        assert_same(one.state.store, one.reference)
    one.kill()


# Mixed bits of keys, against MurmurHash3 in Python integers.


def test_numbers_are_mixed_as_murmurhash_does() -> None:
    numbers = [0, 1, 2**63, 2**64 - 1, 0x0123456789ABCDEF]
    got = mix64(np.array(numbers, np.uint64))
    assert [*map(int, got)] == [*map(mixed, numbers)]
    assert int(got[1]) == 0xB456BCFC34C2CB2C  # fmix64(1) of the reference implementation
