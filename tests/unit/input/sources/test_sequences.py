"""Sources of lists and of Keras PyDatasets, with their notifications, threads and processes."""

from __future__ import annotations

from typing import Any

import pytest

from stratagem.input.sources.adapters import as_source
from stratagem.input.sources.source import INFINITE_CARDINALITY
from tests.unit.input.sources.batches import Batches, values_of


class _Endless(Batches):
    @property
    def num_batches(self) -> None:
        return None


def test_endless_pydataset_has_no_end() -> None:
    source = as_source(_Endless())
    assert source.cardinality == INFINITE_CARDINALITY
    reader = source.open(0)
    assert [next(reader)[0] for _ in range(6)] == [0, 2, 4, 6, 8, 10]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"workers": 3}, marks=pytest.mark.slow)], ids=["alone", "threads"]
)
def test_pydataset_is_notified_of_each_epoch(options: dict[str, Any]) -> None:
    dataset = Batches(**options)
    source = as_source(dataset)
    for epoch in range(2):
        reader = source.open(epoch)
        assert values_of(reader) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
        assert next(reader, None) is None, "the end is told once"
    assert dataset.calls == ["begin", "end"] * 2


@pytest.mark.slow
def test_pydataset_may_have_processes() -> None:
    source = as_source(Batches(workers=2, use_multiprocessing=True))
    assert values_of(source.open(0)) == [[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]
