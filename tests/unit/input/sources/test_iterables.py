"""Sources of generators and of iterables that begin anew."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from stratagem.input.sources.adapters import as_source
from tests.unit.input.sources.batches import values_of


def test_batches_are_kept_apart_from_a_generator_that_fills_one_array() -> None:
    def batches() -> Iterator[Any]:
        buffer = np.zeros(2)
        for number in range(3):
            buffer[:] = number
            yield buffer

    read = list(as_source(batches()).open(0))
    assert values_of(read) == [[[0, 0]], [[1, 1]], [[2, 2]]]


def test_iterable_begins_anew_in_each_epoch() -> None:
    class Batches:
        def __iter__(self) -> Iterator[Any]:
            return iter([np.zeros(1), np.ones(1)])

    source = as_source(Batches())
    assert values_of(source.open(0)) == values_of(source.open(1)) == [[[0]], [[1]]]
    with pytest.raises(NotImplementedError, match="The position in an object of type Batches"):
        source.open(0).state()


def test_element_spec_without_data_is_none() -> None:
    assert as_source([]).element_spec() is None
    assert as_source(iter([])).element_spec() is None
