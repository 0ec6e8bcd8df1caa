"""Loader: batches that are transferred before they are asked for are the same, and none is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.input import iterator as module

pytestmark = pytest.mark.usefixtures("always_in_line")
NUM_EXAMPLES, BATCH_SIZE = 1003, 8
DEVICES = (["cpu:0"], ["cpu:0", "cpu:1"])


@pytest.fixture(name="always_in_line")
def _always_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps the prefetch thread from starting if the machine is busy."""
    monkeypatch.setattr("stratagem.input.iterator.HANDOVER_S", 1e6)


def arrays() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.arange(NUM_EXAMPLES * 3, dtype="float32").reshape(-1, 3)
    return x, np.arange(NUM_EXAMPLES)


def loaded(batches: Any) -> list[str]:
    return [str(batch) for batch in batches]


def dataset_on(devices: list[str], *, buffer_size: int, shuffle: bool = False) -> Any:
    source = sg.input.Dataset(arrays(), batch_size=BATCH_SIZE, shuffle=shuffle, seed=3)
    options = sg.InputOptions(experimental_per_replica_buffer_size=buffer_size)
    return sg.MirroredStrategy(devices).distribute_dataset(source, options=options)


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("num_read", [5, 17, 40, 125])
def test_position_is_that_of_the_last_batch_taken(devices: list[str], num_read: int) -> None:
    dataset = dataset_on(devices, buffer_size=1)
    all_batches = loaded(dataset)
    iterator = iter(dataset)
    for _ in range(num_read):
        next(iterator)
    resumed = iter(dataset)
    resumed.set_state(iterator.get_state())
    assert loaded(resumed) == all_batches[num_read:]
    assert loaded(iterator) == all_batches[num_read:]


def test_small_batches_in_memory_are_put_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def put_steps(stacked: Any, topology: Any, name_of: Any) -> Any:
        sizes.append(len(stacked[0]))
        return put(stacked, topology, name_of)

    put = module.put_steps
    monkeypatch.setattr(module, "put_steps", put_steps)
    loaded(dataset_on(DEVICES[0], buffer_size=1))
    # 125 whole batches and a shorter one, of which 16 were loaded one by one.
    assert sizes == [16, 16, 16, 16, 16, 16, 13]
    del sizes[:]
    loaded(dataset_on(DEVICES[0], buffer_size=0))
    assert sizes == []


def test_a_generator_may_wait_for_the_use_of_its_last_batch() -> None:
    num_used = 0

    def batches() -> Iterator[np.ndarray[Any, Any]]:
        for number in range(60):
            assert num_used == number, "read before the batch before it was used"
            yield np.full((2,), number)

    strategy = sg.OneDeviceStrategy("cpu:0")
    for batch in strategy.distribute_dataset(batches()):
        assert int(batch[0]) == num_used
        num_used += 1
    assert num_used == 60


@pytest.mark.parametrize("steps_per_call", [7, 40])
@pytest.mark.parametrize("shuffle", [False, True])
def test_steps_of_a_call_are_the_batches_one_by_one(steps_per_call: int, shuffle: bool) -> None:
    """Also over the end of an epoch, where the batches before it are fewer than asked for."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    source = sg.input.Dataset(arrays(), batch_size=8, shuffle=shuffle, drop_remainder=True)
    one_by_one = iter(strategy.distribute_dataset(source.repeat(2)))
    iterator = iter(strategy.distribute_dataset(source.repeat(2)))
    for _ in range(240 // steps_per_call):
        many = strategy.run_steps(lambda x, y: y, iterator, steps_per_call)
        each = [next(one_by_one)[1].stacked for _ in range(steps_per_call)]
        np.testing.assert_array_equal(many.stacked, np.stack(each, axis=1))
        assert _num_read(iterator) == _num_read(one_by_one)


def _num_read(iterator: sg.DistributedIterator) -> tuple[int, int]:
    position = iterator.get_state()["position"]
    source = position["source"]
    return source["num_ended"], source["source"]["num_read"] + position["then_read"]


def test_steps_of_a_call_join_batches_that_were_loaded_ahead() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    iterator = iter(strategy.distribute_dataset(sg.input.Dataset(arrays(), batch_size=BATCH_SIZE)))
    for _ in range(20):
        next(iterator)
    first = strategy.run_steps(lambda batch: batch[1][0], iterator, 30)
    np.testing.assert_array_equal(first, np.arange(20, 50) * BATCH_SIZE)


def test_rows_that_do_not_divide_are_read_batch_by_batch() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_dataset(sg.input.Dataset(np.arange(15), batch_size=3))
    parts = strategy.run_steps(lambda rows: rows + 0, iter(dataset), 5).components
    assert [part.shape for part in parts] == [(5, 2), (5, 1)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), np.arange(15).reshape(5, 3))
