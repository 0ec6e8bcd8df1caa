"""sg.input.Dataset: batches of any source, distributed in a strategy's scope."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored


def _parts(batch: Any) -> list[list[Any]]:
    return [np.asarray(part).tolist() for part in batch.components]


def _flat(lists: Iterable[list[Any]]) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def test_a_dataset_is_distributed_in_scope_and_plain_outside() -> None:
    dataset = sg.input.Dataset({"x": np.arange(5)}, batch_size=3)
    assert [batch["x"].tolist() for batch in dataset] == [[0, 1, 2], [3, 4]]
    for strategy in (mirrored(2), mirrored(3)):
        size = -(-3 // strategy.num_replicas_in_sync)
        with strategy.scope():
            first, _ = dataset
        assert _parts(first["x"])[0] == list(range(size))
        assert len(_parts(first["x"])) == strategy.num_replicas_in_sync


def test_epochs_in_scope_follow_one_another() -> None:
    dataset = sg.input.Dataset(np.arange(8), batch_size=8, shuffle=True)
    with mirrored(2).scope():
        orders = {tuple(_flat(_parts(batch))) for _ in range(3) for batch in dataset}
    assert len(orders) == 3
    plain = sg.input.Dataset(np.arange(8), batch_size=8, shuffle=True)
    assert {tuple(batch.tolist()) for _ in range(3) for batch in plain} == orders


def test_dataset_of_batches_goes_through_as_it_is() -> None:
    dataset = sg.input.Dataset([np.zeros(2), np.ones(1)])
    assert len(dataset) == dataset.cardinality == 2
    assert [batch.tolist() for batch in dataset] == [[0, 0], [1]]
    assert dataset.element_spec == sg.input.ArraySpec((None,), "float64")


def test_a_short_last_batch_can_be_dropped() -> None:
    dataset = sg.input.Dataset(np.arange(7), batch_size=3, drop_remainder=True)
    assert [batch.tolist() for batch in dataset] == [[0, 1, 2], [3, 4, 5]]
    assert len(dataset) == 2


def test_examples_with_numbers_are_stacked() -> None:
    class Examples:
        def __len__(self) -> int:
            return 5

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"x": np.full(2, index), "y": index}

    first, second = sg.input.Dataset(Examples(), batch_size=3)
    np.testing.assert_array_equal(first["x"], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(second["y"], [3, 4])
    shuffled = sg.input.Dataset(Examples(), batch_size=5, shuffle=True)
    (batch,) = shuffled
    assert sorted(batch["y"].tolist()) == list(range(5))


def test_unknown_length_has_no_len() -> None:
    with pytest.raises(TypeError, match=r"len\(\) was called on a dataset of unknown"):
        len(sg.input.Dataset(iter([np.zeros(2)])))


@pytest.mark.parametrize("options", [{"shuffle": True}, {"drop_remainder": True}])
def test_options_of_batching_need_a_batch_size(options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match="were passed without batch_size"):
        sg.input.Dataset([np.zeros(2)], **options)


@pytest.mark.parametrize("arrays", [np.zeros((4, 2)), (np.zeros(4), np.zeros(4)), {"x": [1, 2]}])
def test_arrays_without_a_batch_size_are_refused(arrays: Any) -> None:
    with pytest.raises(ValueError, match="Unbatched arrays were passed as a dataset"):
        sg.input.Dataset(arrays)


@pytest.mark.parametrize("arrays", [(np.zeros(4), np.zeros(5)), (np.float32(1), np.float32(2))])
def test_arrays_must_agree_in_length(arrays: Any) -> None:
    with pytest.raises(ValueError, match="A dataset cannot be made from arrays of shapes"):
        sg.input.Dataset(arrays, batch_size=2)


@pytest.mark.parametrize("batch_size", [0, -1])
def test_batch_size_must_be_positive(batch_size: int) -> None:
    with pytest.raises(
        ValueError, match=f"batch_size={batch_size} is out of range.\nExpected 1 or more examples"
    ):
        sg.input.Dataset(np.zeros(4), batch_size=batch_size)


def test_examples_without_numbers_cannot_be_batched() -> None:
    with pytest.raises(TypeError, match="batch_size=2 was passed with an object of type list_iter"):
        sg.input.Dataset(iter([1, 2]), batch_size=2)


def test_other_objects_are_rejected_as_datasets() -> None:
    with pytest.raises(TypeError, match="7 of type int was passed as a dataset"):
        sg.input.Dataset(7)
