"""Repeated sources."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.repeated import RepeatedSource, repeated_cardinality
from stratagem.input.sources.source import INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


@pytest.mark.parametrize(
    ("cardinality", "count", "expected"),
    [
        (4, 3, 12),
        (4, 0, 0),
        (0, None, 0),
        (4, None, INFINITE_CARDINALITY),
        (UNKNOWN_CARDINALITY, None, INFINITE_CARDINALITY),
        (UNKNOWN_CARDINALITY, 2, UNKNOWN_CARDINALITY),
        (UNKNOWN_CARDINALITY, 0, 0),
        (INFINITE_CARDINALITY, 2, INFINITE_CARDINALITY),
    ],
)
def test_lengths_are_those_of_tensorflow(cardinality: int, count: Any, expected: int) -> None:
    assert repeated_cardinality(cardinality, count) == expected  # tf.data, RepeatDatasetOp


def test_each_repetition_has_an_order_of_its_own() -> None:
    dataset = sg.input.Dataset(np.arange(8), batch_size=8, shuffle=True, seed=3).repeat(2)
    orders = [[batch.tolist() for batch in dataset] for _ in range(2)]
    flat = [order for epoch in orders for order in epoch]
    assert all(sorted(order) == list(range(8)) for order in flat)
    assert len({tuple(order) for order in flat}) == 4


def test_an_empty_source_without_end_ends() -> None:
    assert list(RepeatedSource(as_source([]), None).open(0)) == []


def test_a_repetition_of_none_gives_nothing() -> None:
    assert list(sg.input.Dataset([np.arange(2)]).repeat(0)) == []


@pytest.mark.parametrize("num_read", [0, 1, 2, 3, 5, 6])
def test_reader_resumes_from_another_one(num_read: int) -> None:
    source = RepeatedSource(as_source([np.full(1, i) for i in range(2)]), 3)
    reader = source.open(0)
    before = [int(next(reader)[0]) for _ in range(num_read)]
    other = source.open(0)
    other.restore(reader.state())
    assert before + [int(batch[0]) for batch in other] == [0, 1, 0, 1, 0, 1]


def test_repetitions_of_a_generator_say_that_it_can_be_read_once() -> None:
    reader = RepeatedSource(as_source(iter([np.zeros(1)])), None).open(0)
    next(reader)
    with pytest.raises(ValueError, match=r"sg\.input\.Dataset\.from_generator\(function\)"):
        next(reader)


@pytest.mark.parametrize(
    ("count", "error", "message"),
    [
        (2.0, TypeError, "an int, or None to repeat forever"),
        (True, TypeError, "an int, or None to repeat forever"),
        (-2, ValueError, "0 or more; None or -1"),
    ],
)
def test_other_counts_are_refused(count: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sg.input.Dataset([np.zeros(1)]).repeat(count)


def test_files_are_shared_before_they_are_repeated() -> None:
    dataset = sg.input.Dataset.from_files(
        [1, 2, 3, 4], lambda files: [np.full(1, file) for file in files]
    ).repeat(2)
    source = dataset.as_source()
    assert source.num_files == 4
    assert [int(batch[0]) for batch in source.shard(2, 1).open(0)] == [2, 4, 2, 4]
