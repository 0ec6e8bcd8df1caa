"""What each worker has one of: its index, values, datasets."""

from __future__ import annotations

import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import ClosureInputError, OutOfRangeError
from stratagem.parameter_server.coordinator.remote_value import RemoteValueStatus
from stratagem.parameter_server.coordinator.shipping import PerWorkerValues
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.shared_with_workers import (
    LIMIT_S,
    go_on,
    note,
    seen,
    started,
    ten_more,
    wait_to_go_on,
)

pytestmark = pytest.mark.usefixtures("nothing_shared")


# Workers


def test_each_worker_knows_its_index(coordinator) -> None:
    values = [coordinator.schedule(get_current_worker_index, worker=i) for i in (2, 0, 1, 2)]
    assert coordinator.fetch(values) == [2, 0, 1, 2]
    with pytest.raises(RuntimeError, match="called outside of a scheduled function"):
        get_current_worker_index()


def test_functions_of_one_worker_run_in_their_order(coordinator) -> None:
    for i in range(200):
        coordinator.schedule(note, args=(i,), worker=1)
    coordinator.join()
    assert seen == list(range(200))


def test_busy_worker_holds_up_nobody(coordinator) -> None:
    coordinator.schedule(wait_to_go_on, worker=0)
    assert started.acquire(timeout=LIMIT_S)
    values = [coordinator.schedule(get_current_worker_index) for _ in range(20)]
    own = coordinator.schedule(get_current_worker_index, worker=0)
    others = set(coordinator.fetch(values))
    assert others <= {1, 2}
    assert own.status is RemoteValueStatus.NOT_READY
    go_on.set()
    assert own.fetch() == 0
    coordinator.join()


def test_each_worker_gets_its_own_of_per_worker_values(coordinator) -> None:
    each = PerWorkerValues([coordinator.schedule(lambda i=i: i * 100, worker=i) for i in range(3)])
    assert repr(each) == "PerWorkerValues(3 workers)"
    values = [coordinator.schedule(ten_more, args=(each,), worker=i) for i in (1, 2, 0)]
    assert coordinator.fetch(values) == [110, 210, 10]
    with pytest.raises(ValueError, match="received an element of type int"):
        PerWorkerValues([1, 2])
    with pytest.raises(ValueError, match="2 values for 3 workers"):
        coordinator.schedule(ten_more, args=(PerWorkerValues(each.values[:2]),))


def test_state_of_a_function_stays_on_its_worker(coordinator) -> None:
    counts: dict[str, int] = {"calls": 0}

    def count() -> int:
        counts["calls"] += 1
        return counts["calls"]

    values = [coordinator.schedule(count, worker=worker) for worker in (0, 0, 1, 0)]
    assert coordinator.fetch(values) == [1, 2, 1, 3]
    assert counts == {"calls": 0}


# Datasets


def batches(worker: int) -> Any:
    for number in range(3):
        yield np.full(2, 10 * worker + number)


def make_own() -> Any:
    note("made")
    return batches(get_current_worker_index())


def take(iterator: Any) -> Any:
    return next(iterator)


def test_each_worker_reads_its_own_dataset(coordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(make_own))
    assert iter(iterator) is iterator
    for number in range(3):
        values = [coordinator.schedule(take, args=(iterator,), worker=i) for i in range(3)]
        expected = [[10 * worker + number] * 2 for worker in range(3)]
        assert [value.fetch().tolist() for value in values] == expected
    assert seen == ["made"] * 3
    value = coordinator.schedule(take, args=(iterator,), worker=1)
    with pytest.raises(OutOfRangeError, match="raised StopIteration: its dataset is exhausted"):
        coordinator.join()
    with pytest.raises(OutOfRangeError):
        value.fetch()


def test_each_iteration_of_a_dataset_begins_anew(coordinator) -> None:
    dataset = coordinator.create_per_worker_dataset([np.array([1, 2]), np.array([3])])
    first, second = iter(dataset), iter(dataset)
    got = [
        coordinator.schedule(take, args=(iterator,), worker=0).fetch().tolist()
        for iterator in (first, first, second)
    ]
    assert got == [[1, 2], [3], [1, 2]]


def test_dataset_of_a_distributed_input(coordinator) -> None:
    with coordinated(devices_per_worker=2) as own:

        def make() -> Any:
            return sg.get_strategy().distribute_dataset([np.arange(4.0, dtype="float32")] * 2)

        def step(iterator: Any) -> Any:
            strategy = sg.get_strategy()
            total = strategy.run(jnp.sum, args=(next(iterator),))
            return strategy.reduce("sum", total, axis=None)

        iterator = iter(own.create_per_worker_dataset(make))
        values = [own.schedule(step, args=(iterator,)) for _ in range(2)]
        assert own.fetch(values) == [6, 6]


def test_next_batch_is_not_here(coordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(make_own))
    with pytest.raises(NotImplementedError, match=r"next\(\) was called in the coordinator"):
        next(iterator)


def make_failing() -> Any:
    if len(seen) < 1:
        note("failed")
        raise OSError("no such file")
    return iter([np.ones(1)])


def test_dataset_function_that_fails_is_reported_and_tried_again(coordinator) -> None:
    iterator = iter(coordinator.create_per_worker_dataset(make_failing))
    value = coordinator.schedule(take, args=(iterator,), worker=0)
    with pytest.raises(
        ClosureInputError, match="could not create its dataset or other per-worker object: OSError"
    ) as raised:
        coordinator.join()
    assert any("in make_failing" in note for note in raised.value.__notes__)
    with pytest.raises(ClosureInputError):
        value.fetch()
    assert coordinator.schedule(take, args=(iterator,), worker=0).fetch().tolist() == [1]


def test_variable_in_a_dataset_function_is_refused(coordinator) -> None:
    def make() -> Any:
        return [sg.Variable(np.ones(2)).value]

    value = coordinator.schedule(take, args=(iter(coordinator.create_per_worker_dataset(make)),))
    with pytest.raises(ValueError, match="was created in a function on a worker") as raised:
        coordinator.join()
    assert isinstance(raised.value, ClosureInputError)
    copy = pickle.loads(pickle.dumps(raised.value))
    assert type(copy) is type(raised.value)
    assert str(copy) == str(raised.value)
    with pytest.raises(ClosureInputError):
        value.fetch()


def test_distributed_datasets_are_for_workers(coordinator) -> None:
    batches = [np.full(2, number) for number in range(3)]
    strategy = coordinator.strategy
    for dataset in (
        strategy.distribute_dataset(batches),
        strategy.distribute_datasets_from_function(lambda context: batches),
    ):
        with pytest.raises(ValueError, match=r"ClusterCoordinator\.create_per_worker_dataset"):
            iter(dataset)
        with pytest.raises(ValueError, match="was iterated in the coordinator"):
            dataset.reduce(0, lambda total, batch: total)
        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        taken = [coordinator.schedule(add_up, args=(iterator,), worker=1) for _ in batches]
        assert coordinator.fetch(taken) == [0, 2, 4]


def add_up(iterator: Any) -> float:
    return float(sg.get_strategy().reduce("sum", next(iterator), axis=0))
