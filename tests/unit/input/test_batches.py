"""Batches split over replicas: split rule, padding, and invalid batches."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.input.batches import join_parts, split_lengths, take_batch
from stratagem.input.placement import place
from tests.parity.comparison import mirrored, small_regressor

_NONE: list[int] = []
# Examples 0 ... N-1, global batch size, and what each replica gets of each batch.
_SPLITS = [
    (6, 4, [[[0, 1], [2, 3]], [[4], [5]]]),
    (4, 4, [[[0], [1], [2], [3], _NONE]]),
    (8, 4, [[[0, 1], [2, 3], _NONE], [[4, 5], [6, 7], _NONE]]),
    (9, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8], _NONE]]),
    (10, 12, [[[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]]),
    (10, 7, [[[0, 1], [2, 3], [4, 5], [6]], [[7], [8], [9], _NONE]]),
]


@pytest.mark.parametrize(("num_examples", "batch_size", "batches"), _SPLITS)
def test_batches_are_split_by_the_rule(
    num_examples: int, batch_size: int, batches: list[list[list[int]]]
) -> None:
    topology = mirrored(len(batches[0])).topology
    for index, parts in enumerate(batches):
        start = index * batch_size
        rows = np.arange(start, min(start + batch_size, num_examples), dtype="int32")
        placed = place([take_batch((rows,), len(parts))], topology)
        (value,) = placed.value()
        assert [part.tolist() for part in value.components] == parts
        assert placed.size == value.stacked.shape[1] == -(-len(rows) // len(parts))


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 12))
def test_split_shares_every_example_out_in_order(num_examples: int, num_replicas: int) -> None:
    size, lengths = split_lengths(num_examples, num_replicas)
    taken = lengths or (size,) * num_replicas
    assert sum(taken) == num_examples
    assert len(taken) == num_replicas
    full = num_examples // size
    assert taken[:full] == (size,) * full
    assert not any(taken[full + 1 :])


def test_parts_of_replicas_are_padded_to_the_longest() -> None:
    batch = join_parts([np.arange(1.0), None, np.arange(3.0)])
    placed = place([batch], mirrored(3).topology)
    assert [part.tolist() for part in placed.value().components] == [[0], [], [0, 1, 2]]
    assert batch.num_examples == 4
    assert batch.signature != join_parts([None, np.arange(1.0), np.arange(3.0)]).signature


def test_parts_of_different_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="Replicas received different batches"):
        join_parts([np.zeros((2, 3)), np.zeros((2, 4))])


def test_batches_of_one_program_have_equal_signatures() -> None:
    def signature(*shape: int, dtype: str = "float32", weight: bool = False) -> object:
        return take_batch(
            (np.zeros(shape, dtype), np.ones(shape[0]) if weight else None), 2
        ).signature

    assert signature(4, 2) == signature(4, 2)
    others = [signature(3, 2), signature(4, 3), signature(4, 2, dtype="int32")]
    others.append(signature(4, 2, weight=True))
    assert all(other != signature(4, 2) for other in others)


_NOT_BATCHED = {
    "scalar": (np.float32(1), np.float32(2)),
    "unequal": (np.zeros((4, 2)), np.zeros((3, 1))),
    "nothing": (None, None),
}


@pytest.mark.parametrize("name", _NOT_BATCHED)
def test_data_that_is_not_batched_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="Expected batched arrays, all with the same leading size"):
        take_batch(_NOT_BATCHED[name], 2)


@pytest.mark.slow
def test_fit_of_batches_with_unequal_sizes_says_that_they_are_not_batched() -> None:
    with mirrored(2).scope():
        model = small_regressor()
        model.compile(optimizer="sgd", loss="mse")

    def batches():
        yield np.zeros((4, 3), "float32"), np.zeros((4, 1), "float32")
        yield np.zeros((4, 3), "float32"), np.zeros((2, 1), "float32")

    with pytest.raises(ValueError, match="Expected batched arrays, all with the same leading size"):
        model.fit(batches(), shuffle=False, verbose=0)


def test_predict_of_a_dataset_that_is_not_batched_says_so() -> None:
    class Examples(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> tuple[np.float32]:
            return (np.float32(index),)

    with mirrored(2).scope():
        model = small_regressor()
    with pytest.raises(ValueError, match="Expected batched arrays, all with the same leading size"):
        model.predict(Examples(), verbose=0)


def _objects(rows: list[Any]) -> Any:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


class RaggedTensor:
    """The attributes of a tf.RaggedTensor that are read."""

    row_splits = np.array([0, 2, 5])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (_objects([np.zeros(2), np.zeros(3)]), r"an array of objects with rows of shape \(2,\), "),
        (_objects([[1, 2], [3]]), "an array of objects with rows of 2 values, 1 values"),
        ({"x": _objects([[1]] * 6)}, "1 values and 2 more"),
        (np.array(RaggedTensor(), object), "a RaggedTensor with rows of 2 values, 3 values"),
        ([np.zeros(2), np.zeros(3)], "Convert lists of rows to arrays"),
        (RaggedTensor(), "a RaggedTensor with rows of 2 values, 3 values"),
    ],
)
def test_rows_of_different_lengths_are_refused_with_the_way_out(batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        take_batch(batch, 2)
    assert "keras.utils.pad_sequences" in str(caught.value)


def test_texts_are_no_rows() -> None:
    assert take_batch(_objects(["a", "bc"]), 2).num_examples == 2
