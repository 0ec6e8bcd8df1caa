"""Partitioners: the numbers of TensorFlow's own tests, and its rules."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stratagem as sg
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


def test_scalars_are_not_split() -> None:
    for partitioner in (
        sg.partitioners.FixedShardsPartitioner(4),
        sg.partitioners.MinSizePartitioner(1, 4),
        sg.partitioners.MaxSizePartitioner(1),
    ):
        assert partitioner((), "float32") == []
        assert rows_of_shards(partitioner, (), "float32", name="v") == [1]


def test_dtype_counts() -> None:
    partitioner = sg.partitioners.MaxSizePartitioner(64)
    assert partitioner((64,), "int8") == [1]
    assert partitioner((64,), "float64") == [8]


def test_first_shards_have_a_row_more() -> None:
    fixed = sg.partitioners.FixedShardsPartitioner(5)
    assert rows_of_shards(fixed, (13, 2), "float32", name="v") == [3, 3, 3, 2, 2]
    assert rows_of_shards(None, (13, 2), "float32", name="v") == [13]
    assert rows_of_shards(fixed, (0, 2), "float32", name="v") == [0]


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
    with pytest.raises(ValueError, match=f"num_shards={value!r} of FixedShards.* is not valid"):
        sg.partitioners.FixedShardsPartitioner(value)
    with pytest.raises(ValueError, match=r"min_shard_bytes=.* is not valid"):
        sg.partitioners.MinSizePartitioner(value)
    with pytest.raises(ValueError, match=r"max_shards=.* is not valid"):
        sg.partitioners.MinSizePartitioner(1, value)
    with pytest.raises(ValueError, match=r"max_shard_bytes=.* is not valid"):
        sg.partitioners.MaxSizePartitioner(value)
    with pytest.raises(ValueError, match=r"bytes_per_string=.* is not valid"):
        sg.partitioners.MaxSizePartitioner(1, bytes_per_string=value)


def test_no_shards_at_most_are_refused() -> None:
    with pytest.raises(ValueError, match="max_shards=0 of MaxSizePartitioner is not valid"):
        sg.partitioners.MaxSizePartitioner(1, 0)


@pytest.mark.parametrize("answer", [[2], [1, 2], [0, 1], [2, 1, 1], 2, ["2", 1], []])
def test_answer_of_a_partitioner_of_ones_own_is_checked(answer) -> None:
    with pytest.raises(ValueError, match=r"The partitioner returned .* for variable 'table'"):
        rows_of_shards(lambda shape, dtype, axis=0: answer, (4, 4), "float32", name="table")


def test_more_shards_than_rows_are_as_many_as_rows() -> None:
    def many(shape, dtype, axis=0):
        return [9, 1]

    assert rows_of_shards(many, (3, 4), "float32", name="v") == [1, 1, 1]
