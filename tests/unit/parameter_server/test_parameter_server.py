"""Partitioners: the numbers of TensorFlow's own tests, and its rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
from stratagem.parameter_server.fingerprints import (
    concatenated_fingerprint,
    fingerprint,
    fingerprints,
)
from stratagem.parameter_server.partitioners import rows_of_shards


@pytest.mark.parametrize(
    ("partitioner", "shape", "wanted"),
    [
        (sg.partitioners.FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (sg.partitioners.FixedShardsPartitioner(5), (2, 3), [2, 1]),
        (sg.partitioners.MinSizePartitioner(4, 2), (6, 1), [2, 1]),
        (sg.partitioners.MinSizePartitioner(4, 10), (6, 1), [6, 1]),
        (sg.partitioners.MinSizePartitioner(20_000, 8), (100, 256), [6, 1]),
        (sg.partitioners.MinSizePartitioner(), (10**6, 4), [1, 1]),
        (sg.partitioners.MaxSizePartitioner(4), (6, 1), [6, 1]),
        (sg.partitioners.MaxSizePartitioner(4, 2), (6, 1), [2, 1]),
        (sg.partitioners.MaxSizePartitioner(1024), (6, 1), [1, 1]),
        (sg.partitioners.MaxSizePartitioner(20_000), (100, 256), [6, 1]),
        (sg.partitioners.MaxSizePartitioner(1), (3, 256), [3, 1]),  # a row is larger than that
        (sg.partitioners.MaxSizePartitioner(64), (100, 0), [100, 1]),
    ],
)
def test_numbers_of_shards(partitioner, shape, wanted) -> None:
    """Those of TF 2.21 sharded_variable_test.py, and of the contract."""
    assert partitioner(shape, "float32") == wanted


def test_axis_may_be_another_than_the_first() -> None:
    assert sg.partitioners.FixedShardsPartitioner(4)((2, 8), "float32", axis=1) == [1, 4]


def test_scalars_are_not_split_the_dtype_counts_and_first_shards_have_a_row_more() -> None:
    fixed, of_size = sg.partitioners.FixedShardsPartitioner(5), sg.partitioners.MaxSizePartitioner
    for partitioner in (fixed, sg.partitioners.MinSizePartitioner(1, 4), of_size(1)):
        assert partitioner((), "float32") == []
        assert rows_of_shards(partitioner, (), "float32", name="v") == [1]
    assert [of_size(64)((64,), dtype) for dtype in ("int8", "float64")] == [[1], [8]]
    for partitioner, shape, wanted in (
        (fixed, (13, 2), [3, 3, 3, 2, 2]),
        (None, (13, 2), [13]),
        (fixed, (0, 2), [0]),
        (lambda shape, dtype, axis=0: [9, 1], (3, 4), [1, 1, 1]),  # more than there are rows
    ):
        assert rows_of_shards(partitioner, shape, "float32", name="v") == wanted


@given(st.integers(1, 500), st.integers(1, 40), st.integers(1, 5000), st.integers(1, 9))
def test_shards_hold_every_row_once_and_keep_their_limits(rows, columns, size, most) -> None:
    shape = (rows, columns)
    largest = rows_of_shards(sg.partitioners.MaxSizePartitioner(size), shape, "float32", name="v")
    assert sum(largest) == rows
    assert min(largest) >= 1
    assert max(largest) - min(largest) <= 1
    assert max(largest) * columns * 4 <= size or max(largest) == 1
    smallest = rows_of_shards(
        sg.partitioners.MinSizePartitioner(size, most), shape, "float32", name="v"
    )
    assert len(smallest) == max(1, min(rows, most, math.ceil(rows * columns * 4 / size)))


@pytest.mark.parametrize("value", [0, -1, True, "2", None])
def test_invalid_size_is_refused(value) -> None:
    error = TypeError if value in (True, "2") else ValueError
    with pytest.raises(error, match=f"FixedShardsPartitioner received num_shards={value!r}"):
        sg.partitioners.FixedShardsPartitioner(value)
    with pytest.raises(error, match=r"min_shard_bytes=.*"):
        sg.partitioners.MinSizePartitioner(value)
    with pytest.raises(error, match=r"max_shards=.*"):
        sg.partitioners.MinSizePartitioner(1, value)
    with pytest.raises(error, match="MaxSizePartitioner received max_shards="):
        sg.partitioners.MaxSizePartitioner(1, value or 0)  # None: as many as there are rows
    with pytest.raises(error, match=r"max_shard_bytes=.*"):
        sg.partitioners.MaxSizePartitioner(value)
    with pytest.raises(error, match=r"bytes_per_string=.*"):
        sg.partitioners.MaxSizePartitioner(1, bytes_per_string=value)


@pytest.mark.parametrize("answer", [[2], [1, 2], [0, 1], [2, 1, 1], 2, ["2", 1], []])
def test_answer_of_a_partitioner_of_ones_own_is_checked(answer) -> None:
    with pytest.raises(ValueError, match=r"The partitioner returned .* for variable 'table'"):
        rows_of_shards(lambda shape, dtype, axis=0: answer, (4, 4), "float32", name="table")


# Fingerprints match TensorFlow's in every process, whatever the seed of Python's hash.

# Of FarmHash 1.1 (pyfarmhash 0.5.1, fingerprint64), one for each branch of the algorithm.
FINGERPRINTS = [
    (b"", 11160318154034397263),
    (b"a", 12917804110809363939),
    (b"blue", 10660015788068286345),
    (b"Thursday", 6237322437236285668),
    (b"x" * 20, 8233088228747857348),
    (b"stratagem" * 5, 1688828096076320655),
    (b"stratagem" * 30, 1628840974559416250),
]


@pytest.mark.parametrize(("text", "expected"), FINGERPRINTS, ids=lambda value: str(value)[:12])
def test_fingerprint_is_that_of_farmhash(text, expected) -> None:
    assert fingerprint(text) == expected


def test_fingerprints_are_put_together_in_their_order() -> None:
    assert concatenated_fingerprint(1, 2) != concatenated_fingerprint(2, 1)
    assert 0 <= concatenated_fingerprint(2**64 - 1, 2**64 - 1) < 2**64


RNG = np.random.default_rng(0)
TEXTS = [RNG.integers(0, 256, size, "uint8").tobytes() for size in [*range(70), 127, 128, 300] * 2]


def test_array_of_strings_of_every_length_has_the_fingerprint_of_each() -> None:
    array = np.empty(len(TEXTS), object)
    array[:] = TEXTS
    assert fingerprints(array).tolist() == [*map(fingerprint, TEXTS)]
    # More than are hashed at once, as UTF-8.
    texts = np.array([f"Zürich {number:06}" for number in range(9000)])
    some = [text.encode() for text in texts[::1000].tolist()]
    assert fingerprints(texts)[::1000].tolist() == [*map(fingerprint, some)]
