"""Placement of batches on devices: padding, stacking, shardings, and several steps at once."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.input.batches import take_batch
from stratagem.input.placement import HostSteps, place
from tests.parity.comparison import mirrored


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


def test_uint8_stays_uint8_and_text_stays_on_the_host() -> None:
    data = {"image": np.zeros((3, 2), np.uint8), "name": np.array(["a", "b", "c"])}
    value = place([take_batch(data, 2)], mirrored(2).topology).value()
    assert value["image"].stacked.dtype == np.uint8
    assert [part.tolist() for part in value["name"].components] == [["a", "b"], ["c"]]


def test_batches_may_stay_on_the_host() -> None:
    placed = place([take_batch(np.arange(3), 2)], mirrored(2).topology, to_device=False)
    assert isinstance(placed.value().stacked, np.ndarray)
    assert [part.tolist() for part in placed.value().components] == [[0, 1], [2]]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_steps_that_were_read_at_once_are_placed_as_their_batches(num_replicas: int) -> None:
    rows = np.arange(24, dtype="float32").reshape(3, 4, 2)
    first = take_batch(rows[0], num_replicas)
    steps = HostSteps(first, [rows], 3)
    topology = mirrored(num_replicas).topology
    placed, expected = place(steps, topology), place(steps.batches(), topology)
    np.testing.assert_array_equal(placed.arrays[0], expected.arrays[0])
    assert placed.arrays[0].sharding == expected.arrays[0].sharding
    assert (placed.signature, placed.num_steps) == (expected.signature, 3)
