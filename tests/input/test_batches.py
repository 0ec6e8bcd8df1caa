"""Batches split over replicas: split rule, padding, and invalid batches."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.input.batches import join_parts, place, take_batch
from stratagem.input.splitting import split_lengths
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


def test_padding_repeats_the_last_example_of_the_batch() -> None:
    rows = np.arange(10, dtype="float32").reshape(5, 2)
    placed = place([take_batch({"x": rows, "w": None}, 4)], mirrored(4).topology)
    (array,) = (np.asarray(array) for array in placed.arrays)
    assert array.shape == (4, 2, 2)
    assert placed.lengths == (2, 2, 1, 0)
    np.testing.assert_array_equal(array.reshape(8, 2)[5:], [rows[4]] * 3)
    assert placed.value()["w"] is None


def test_each_part_lies_on_the_device_of_its_replica() -> None:
    strategy = mirrored(2)
    (placed,) = place([take_batch((np.arange(4),), 2)], strategy.topology).arrays
    where = {shard.device.id: np.asarray(shard.data).ravel() for shard in placed.addressable_shards}
    np.testing.assert_array_equal(where[0], [0, 1])
    np.testing.assert_array_equal(where[1], [2, 3])


def test_several_batches_are_stacked_with_steps_first() -> None:
    batches = [take_batch((np.arange(start, start + 3, dtype="int32"),), 2) for start in (0, 10)]
    placed = place(batches, mirrored(2).topology)
    assert np.asarray(placed.arrays[0]).tolist() == [[[0, 1], [2, 2]], [[10, 11], [12, 12]]]
    assert placed.lengths == (2, 1)
    assert placed.step_shape(placed.arrays[0]) == (2, 2)


_ROWS = np.arange(24, dtype="float32").reshape(12, 2)
_IN_ONE_ARRAY = {
    "one after the other": [_ROWS[start : start + 4] for start in (0, 4, 8)],
    "backwards": [_ROWS[start : start + 4] for start in (8, 4, 0)],
    "overlapping": [_ROWS[start : start + 4] for start in (0, 2, 4)],
    "with holes": [_ROWS[start : start + 3] for start in (0, 4, 8)],
    "strided": [_ROWS[start::3] for start in (0, 1, 2)],
    "columns": [_ROWS[start : start + 4, :1] for start in (0, 4, 8)],
    "copies": [_ROWS[start : start + 4].copy() for start in (0, 4, 8)],
    "the same": [_ROWS[:4]] * 3,
}


@pytest.mark.parametrize("name", _IN_ONE_ARRAY)
def test_batches_that_lie_in_one_array_are_those_that_were_given(name: str) -> None:
    parts = _IN_ONE_ARRAY[name]
    placed = place([take_batch(part, 1) for part in parts], mirrored(1).topology)
    np.testing.assert_array_equal(placed.arrays[0], np.stack(parts))


@pytest.mark.parametrize("num_steps", [1, 3])
def test_arrays_of_a_device_are_split_as_those_of_the_host(num_steps: int) -> None:
    rows = np.arange(10, dtype="float32").reshape(5, 2)
    on_host = [take_batch((rows + step,), 3) for step in range(num_steps)]
    # On an accelerator take_batch leaves them where they are.
    on_device = [
        dataclasses.replace(batch, arrays=[jnp.asarray(array) for array in batch.arrays])
        for batch in on_host
    ]
    topology = mirrored(3).topology
    expected, placed = (place(batches, topology) for batches in (on_host, on_device))
    np.testing.assert_array_equal(placed.arrays[0], expected.arrays[0])
    assert placed.arrays[0].sharding == expected.arrays[0].sharding


def test_parts_of_replicas_are_padded_to_the_longest() -> None:
    batch = join_parts([np.arange(1.0), None, np.arange(3.0)])
    placed = place([batch], mirrored(3).topology)
    assert [part.tolist() for part in placed.value().components] == [[0], [], [0, 1, 2]]
    assert batch.num_examples == 4
    assert batch.signature != join_parts([None, np.arange(1.0), np.arange(3.0)]).signature


def test_parts_of_different_kinds_are_refused() -> None:
    with pytest.raises(ValueError, match="Replicas received different batches"):
        join_parts([np.zeros((2, 3)), np.zeros((2, 4))])


def test_uint8_stays_uint8_and_text_stays_on_the_host() -> None:
    data = {"image": np.zeros((3, 2), np.uint8), "name": np.array(["a", "b", "c"])}
    value = place([take_batch(data, 2)], mirrored(2).topology).value()
    assert value["image"].stacked.dtype == np.uint8
    assert [part.tolist() for part in value["name"].components] == [["a", "b"], ["c"]]


def test_batches_may_stay_on_the_host() -> None:
    placed = place([take_batch(np.arange(3), 2)], mirrored(2).topology, to_device=False)
    assert isinstance(placed.value().stacked, np.ndarray)
    assert [part.tolist() for part in placed.value().components] == [[0, 1], [2]]


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
