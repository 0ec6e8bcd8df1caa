"""What each worker has one of: its index, values, datasets."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import ClosureInputError, OutOfRangeError
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.coordinator.remote_value import RemoteValueStatus
from stratagem.parameter_server.coordinator.shipping import (
    PerWorkerValues,
    SentCall,
    ended_in,
    pack_calls,
)
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.parameter_server.strategy import make_worker
from tests.unit.parameter_server.clusters import coordinated, local_strategy
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


# What a worker answers, message by message.


class Driver:
    """Tells a worker what a coordinator would."""

    def __init__(self, strategy: Any, connections: Connections) -> None:
        self._strategy = strategy
        self._connections = connections
        self._answers: dict[int, Message] = {}

    def join(self, first_order: int = 0) -> None:
        fields = {
            "coordinator": "a name",
            "servers": self._strategy.cluster.server_addresses,
            "index": 0,
            "mode": asdict(UpdateMode()),
            "first_order": first_order,
        }
        assert self._connections.ask(0, Message("join", fields)).kind == "ok"
        function = np.frombuffer(KERAS_PACKING.pack(note_and_add, self._strategy), np.uint8)
        self._connections.ask(0, Message("function", {"number": 1}, [function]))

    def run(self, order: int, value: int = 0) -> Any:
        """What the function returns for a value; or the kind of another answer."""
        answer = self.run_group(order, [value])
        return answer if isinstance(answer, str) else answer[0]

    def run_group(self, order: int, values: list[Any]) -> list[Any] | str:
        """What the function returns for values, or the error; or the kind of another answer."""
        calls = [
            SentCall(1, order, False, KERAS_PACKING.pack(((value,), {}), self._strategy))
            for value in values
        ]
        answer = self._connections.ask(
            0, pack_calls(calls, {"order": order, "first_open": 0, "num_writes": 0})
        )
        if answer.kind != "ran":
            return answer.kind
        ended = list(ended_in(answer))
        assert all(one.duration_s >= 0 for one in ended)
        return [
            KERAS_PACKING.unpack(one.packed, self._strategy)
            if one.trace is None
            else pickle.loads(one.packed)
            for one in ended
        ]

    def run_later(self, order: int, value: int = 0) -> tuple[threading.Thread, list[Any]]:
        """A thread that asks, and its answer."""
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(self.run(order, value)), daemon=True
        )
        thread.start()
        return thread, answers


def note_and_add(value: int) -> int:
    seen.append(value)
    return ten_more(value)


@pytest.fixture
def driver() -> Iterator[Driver]:
    with local_strategy() as strategy:
        keys = strategy.cluster.keys
        with (
            contextlib.closing(make_worker(keys, devices=["cpu:0"])) as worker,
            contextlib.closing(Connections(keys, [worker.address], peers="Worker")) as connections,
        ):
            yield Driver(strategy, connections)


def test_functions_run_in_the_order_in_which_they_were_sent(driver) -> None:
    driver.join()
    second, answers = driver.run_later(1, 5)
    second.join(0.2)
    assert answers == []
    assert driver.run(0, 4) == 14
    second.join(LIMIT_S)
    assert answers == [15]
    assert seen == [4, 5]


def test_group_ends_with_the_first_function_that_fails(driver) -> None:
    driver.join()
    assert driver.run_group(0, [1, 2, 3]) == [11, 12, 13]
    first, error = driver.run_group(1, [4, "no number", 5])
    assert first == 14
    assert isinstance(error, TypeError)
    assert seen == [1, 2, 3, 4, "no number"]
    assert driver.run(2, 6) == 16


def test_function_whose_answer_was_lost_does_not_run_again(driver) -> None:
    driver.join()
    assert driver.run(0, 4) == 14
    assert driver.run(0, 4) == 14
    assert seen == [4]


def test_what_was_sent_before_the_worker_joined_anew_is_to_be_sent_again(driver) -> None:
    driver.join(first_order=3)
    assert driver.run(2) == "again"
    assert driver.run(3, 1) == 11
    assert seen == [1]


def test_what_waits_for_a_number_that_was_lost_is_answered_when_the_worker_joins_anew(
    driver,
) -> None:
    driver.join()
    waiting, answers = driver.run_later(1, 5)  # 0 was lost on its way
    waiting.join(0.2)
    assert answers == []
    driver.join(first_order=2)
    waiting.join(LIMIT_S)
    assert answers == ["again"]
    assert driver.run(2, 6) == 16
    assert seen == [6]
