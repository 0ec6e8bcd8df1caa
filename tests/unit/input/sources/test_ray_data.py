"""Datasets of Ray Data: refusals, with stand-ins; `validation/ray` reads real ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input.sources.adapters import RayDataSource, as_source


class DataIterator:
    """Batches of one process, as from `streaming_split`; notes the options of each reading."""

    def __init__(self) -> None:
        self.options: list[dict[str, Any]] = []

    def iter_batches(self, **options: Any) -> Iterator[dict[str, np.ndarray]]:
        self.options.append(options)
        yield from ({"id": np.array([number])} for number in range(3))


class Dataset(DataIterator):
    """A dataset that can be shuffled."""

    def random_shuffle(self, *, seed: int) -> Dataset:
        self.options.append({"seed": seed})
        return self


for stand_in in (DataIterator, Dataset):
    stand_in.__module__ = "ray.data"


def _source(dataset: Any, **options: Any) -> RayDataSource:
    source = sg.input.Dataset(dataset, batch_size=2, **options).as_source()
    assert isinstance(source, RayDataSource)
    return source


def test_options_reach_ray_in_each_epoch() -> None:
    dataset = Dataset()
    source = _source(dataset, shuffle=True, seed=5, drop_remainder=True)
    for epoch in range(2):
        assert [batch["id"].item() for batch in source.open(epoch)] == [0, 1, 2]
    batching = {"batch_format": "numpy", "batch_size": 2, "drop_last": True}
    assert dataset.options == [{"seed": 5}, batching, {"seed": 6}, batching]


def test_a_position_is_refused() -> None:
    reader = _source(Dataset()).open(0)
    for method in (reader.state, lambda: reader.restore({})):
        with pytest.raises(NotImplementedError, match="position in a dataset of Ray Data cannot"):
            method()


def test_rows_are_not_batches() -> None:
    with pytest.raises(ValueError, match="An object of type Dataset of Ray Data was passed"):
        as_source(Dataset())


def test_several_processes_need_an_iterator_each() -> None:
    assert _source(DataIterator()).auto_shard_policy == sg.AutoShardPolicy.OFF
    with pytest.raises(ValueError, match="passed to a strategy of several processes"):
        _ = _source(Dataset()).auto_shard_policy
    with pytest.raises(ValueError, match="shuffle=True was passed with a Ray DataIterator"):
        _source(DataIterator(), shuffle=True)


def test_input_workers_are_refused() -> None:
    with pytest.raises(TypeError, match="Ray's own executor reads"):
        sg.input.service.register_dataset("127.0.0.1:1", _source(Dataset()))
