"""How a batch is shared among replicas: the split rule, padding, and what is no batch."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.keras.batches import place, split_lengths, take_batch
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
        arguments = place([take_batch((rows,))], topology)
        placed = np.asarray(arguments.split[0])
        lengths = arguments.batch.lengths or (placed.shape[1],) * len(parts)
        true_rows = [part[:n].tolist() for part, n in zip(placed, lengths, strict=True)]
        assert true_rows == parts
        assert arguments.batch.size == placed.shape[1] == -(-len(rows) // len(parts))


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
    arguments = place([take_batch({"x": rows, "w": None})], mirrored(4).topology)
    (placed,) = (np.asarray(array) for array in arguments.split)
    assert placed.shape == (4, 2, 2)
    assert arguments.batch.lengths == (2, 2, 1, 0)
    np.testing.assert_array_equal(placed.reshape(8, 2)[5:], [rows[4]] * 3)


def test_each_part_lies_on_the_device_of_its_replica() -> None:
    strategy = mirrored(2)
    (placed,) = place([take_batch((np.arange(4),))], strategy.topology).split
    where = {shard.device.id: np.asarray(shard.data).ravel() for shard in placed.addressable_shards}
    np.testing.assert_array_equal(where[0], [0, 1])
    np.testing.assert_array_equal(where[1], [2, 3])


def test_several_batches_are_stacked_with_steps_first() -> None:
    batches = [take_batch((np.arange(start, start + 3, dtype="int32"),)) for start in (0, 10)]
    arguments = place(batches, mirrored(2).topology)
    placed = np.asarray(arguments.split[0])
    assert placed.tolist() == [[[0, 1], [2, 2]], [[10, 11], [12, 12]]]
    assert arguments.batch.lengths == (2, 1)


def test_batches_of_one_program_have_equal_signatures() -> None:
    def signature(*shape: int, dtype: str = "float32", weight: bool = False) -> object:
        return take_batch((np.zeros(shape, dtype), np.ones(shape[0]) if weight else None)).signature

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
        take_batch(_NOT_BATCHED[name])


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
