"""What each worker has one of, what it answers, and the threads that keep it busy."""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import (
    ClosureInputError,
    OutOfRangeError,
    PSUnavailableError,
    UnavailableError,
)
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.coordinator import coordinated_workers
from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue
from stratagem.parameter_server.coordinator.coordinated_workers import (
    StallWatch,
    TransientFailures,
    WorkerLink,
    is_stalled,
)
from stratagem.parameter_server.coordinator.remote_value import Closure, RemoteValueStatus
from stratagem.parameter_server.coordinator.shipping import (
    MAX_UNANSWERED,
    PerWorkerValues,
    RecentDuration,
    SentCall,
    calls_in,
    ended_in,
    pack_calls,
)
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.parameter_server.strategy import make_worker
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.coordinator.test_cluster_coordinator import synchronous_step
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
    with pytest.raises(NotImplementedError, match=r"next\(\) was called in the coordinator"):
        next(iterator)
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


def make_failing() -> Any:
    if not seen:
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
    def add_up(iterator: Any) -> float:
        return float(sg.get_strategy().reduce("sum", next(iterator), axis=0))

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
        strategy, unpack = self._strategy, KERAS_PACKING.unpack
        packed = [KERAS_PACKING.pack(((value,), {}), strategy) for value in values]
        calls = [SentCall(1, order, False, one) for one in packed]
        fields = {"order": order, "first_open": 0, "num_writes": 0}
        answer = self._connections.ask(0, pack_calls(calls, fields))
        if answer.kind != "ran":
            return answer.kind
        ended = list(ended_in(answer))
        assert all(one.duration_s >= 0 for one in ended)
        return [
            unpack(one.packed, strategy) if one.trace is None else pickle.loads(one.packed)
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


def test_functions_run_once_in_their_order_and_a_group_ends_with_the_first_that_fails(
    driver,
) -> None:
    driver.join()
    second, answers = driver.run_later(1, 5)
    second.join(0.2)
    assert answers == []
    for _ in range(2):  # the first answer may be lost
        assert driver.run(0, 4) == 14
    second.join(LIMIT_S)
    assert answers == [15]
    assert driver.run_group(2, [1, 2, 3]) == [11, 12, 13]
    first, error = driver.run_group(3, [4, "no number", 5])
    assert first == 14
    assert isinstance(error, TypeError)
    assert driver.run(4, 6) == 16
    assert seen == [4, 5, 1, 2, 3, 4, "no number", 6]


def test_what_was_sent_before_the_worker_joined_anew_is_to_be_sent_again(driver) -> None:
    driver.join()
    waiting, answers = driver.run_later(1, 5)  # 0 was lost on its way
    waiting.join(0.2)
    assert answers == []
    driver.join(first_order=3)
    waiting.join(LIMIT_S)
    assert answers == ["again"]
    assert driver.run(2) == "again"
    assert driver.run(3, 6) == 16
    assert seen == [6]


# Threads of the coordinator that keep one worker busy.


def test_counts_that_cannot_be_added_are_an_error_of_the_function(monkeypatch) -> None:
    def fail(link: WorkerLink, counted: Any) -> None:
        raise MemoryError("counts of a metric")

    with coordinated() as coordinator:
        with monkeypatch.context() as patched:
            patched.setattr(WorkerLink, "_count", fail)
            with coordinator.strategy.scope():
                metric = keras.metrics.Sum()
            coordinator.schedule(lambda: metric.update_state(1.0))
            with pytest.raises(MemoryError, match="counts of a metric"):
                assert coordinator.wait(120)
        assert coordinator.fetch(coordinator.schedule(lambda: 2)) == 2


def test_function_sent_after_a_lost_one_runs(monkeypatch) -> None:
    """The worker keeps it for the lost one, which another worker has run meanwhile."""
    ask, put_back = Connections.ask, ClosureQueue.put_back
    is_second_sent = threading.Event()
    lost: list[int] = []

    def ask_without_the_first(
        self: Connections, server: int, message: Message, **limits: Any
    ) -> Message:
        if message.kind == "run" and not lost:
            if message.fields["order"] == 0:
                assert is_second_sent.wait(120)
                lost.extend(call.closure for call in calls_in(message))
                raise UnavailableError("lost in transit")
            is_second_sent.set()
        return ask(self, server, message, **limits)

    def finish_elsewhere(queue: ClosureQueue, closure: Closure) -> None:
        if closure.number in lost:
            queue.finish(closure, None)
        else:
            put_back(queue, closure)

    with coordinated() as coordinator:
        monkeypatch.setattr(Connections, "ask", ask_without_the_first)
        monkeypatch.setattr(ClosureQueue, "put_back", finish_elsewhere)
        # The second is sent at once, since a third waits.
        values = [coordinator.schedule(lambda: 7) for _ in range(3)]
        assert coordinator.wait(60.0)
        assert [coordinator.fetch(value) for value in values] == [None, 7, 7]
        assert lost


def test_short_functions_travel_in_groups(monkeypatch) -> None:
    ask, sizes = Connections.ask, list[int]()

    def counted_ask(self: Connections, server: int, message: Message, **limits: Any) -> Message:
        if message.kind == "run":
            sizes.append(len(message.fields["calls"]))
        return ask(self, server, message, **limits)

    monkeypatch.setattr(Connections, "ask", counted_ask)
    with coordinated() as coordinator:
        values = [coordinator.schedule(pow, args=(2, power)) for power in range(500)]
        assert coordinator.wait(60.0)
        assert coordinator.fetch(values) == [2**power for power in range(500)]
        assert sum(sizes) == 500
        assert max(sizes) > 4

        # Those before the one that fails end.
        values.clear()

        def schedule_all() -> None:
            for i in range(500):
                values.append(coordinator.schedule(divmod, args=(1, 300 - i)))
            coordinator.join()

        with pytest.raises(ZeroDivisionError):  # by schedule() if the worker is fast
            schedule_all()
        assert coordinator.fetch(values[:300]) == [divmod(1, 300 - i) for i in range(300)]


def test_functions_whose_answer_was_lost_make_their_updates_once(monkeypatch) -> None:
    """The worker goes on with later functions, whose answers arrive."""
    ask, lock = Connections.ask, threading.Lock()
    sent: list[int] = []
    num_sent_before: list[int] = []

    def ask_losing_an_answer(
        self: Connections, server: int, message: Message, **limits: Any
    ) -> Message:
        if message.kind != "run":
            return ask(self, server, message, **limits)
        with lock:
            sent.append(message.fields["order"])
            is_lost = len(sent) == 3
        answer = ask(self, server, message, **limits)
        if is_lost:  # a broken connection is noticed late
            until(lambda: len(sent) >= 3 + MAX_UNANSWERED - 1)
            time.sleep(0.1)  # in which no more are sent
            num_sent_before.append(len(sent))
            raise UnavailableError("the answer was lost")
        return answer

    monkeypatch.setattr(Connections, "ask", ask_losing_an_answer)
    count = 60
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            counts = sg.Variable(np.zeros(count, np.float32))

        def add(place: int) -> None:
            time.sleep(0.002)
            counts.assign_add(np.eye(count, dtype=np.float32)[place])

        for place in range(count):
            coordinator.schedule(add, args=(place,))
        with pytest.warns(RuntimeWarning, match="were not applied again"):
            coordinator.join()
        np.testing.assert_array_equal(counts.numpy(), 1)
    assert num_sent_before == [3 + MAX_UNANSWERED - 1]


# Synchronous updates that nobody would complete.


@pytest.mark.parametrize(
    ("running", "idle", "num_queued", "waiting", "wanted"),
    [
        ([0, 1], [], 0, ["worker 0", "worker 1"], True),  # each for the other
        ([0, 1], [], 5, ["worker 0", "worker 1"], True),  # nobody is free for what is queued
        ([0], [1], 0, ["worker 0"], True),  # nothing is left for the other
        ([0], [1], 1, ["worker 0"], False),  # it will take the next one
        ([0, 1], [], 0, ["worker 0"], False),  # one computes
        ([0], [], 0, [], False),
        ([], [0], 0, [], False),
        ([], [0], 0, ["worker 0"], False),  # an answer is on its way
    ],
)
def test_stalled_is_where_all_who_run_wait(running, idle, num_queued, waiting, wanted) -> None:
    assert is_stalled(running, idle, num_queued, waiting) is wanted


@pytest.mark.parametrize(
    ("workers", "num_stalls"),
    [
        ([None] * 3, 1),  # the last one has nobody to wait for
        pytest.param([0, 0], 2, marks=pytest.mark.slow),  # one of these cannot help the other
    ],
)
def test_step_that_is_left_alone_is_made_in_the_end(workers, num_stalls) -> None:
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        step, variable = synchronous_step(coordinator)
        for worker in workers:
            coordinator.schedule(step, worker=worker)
        coordinator.join()
        assert coordinator.stalls is not None
        found = coordinator.stalls.num_stalls
        assert found == num_stalls or (None in workers and found > num_stalls)
        np.testing.assert_array_equal(np.asarray(variable.value), [-float(len(workers))] * 2)


def test_workers_that_wait_for_each_other_at_different_servers_go_on() -> None:
    """As after two restarts of servers: here each pushes to a server of its own."""
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        strategy = coordinator.strategy
        with strategy.scope():
            made = [sg.Variable(np.zeros(3, "float32")) for _ in range(2)]
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build(made)

        def replica_step(place: int) -> None:
            _, gradients = sg.value_and_grad(lambda: made[place].value.sum(), [made[place]])
            optimizer.apply_gradients(zip(gradients, [made[place]], strict=True))

        def step(place: int) -> None:
            strategy.run(functools.partial(replica_step, place))

        for place in range(2):
            coordinator.schedule(step, args=(place,), worker=place)
        coordinator.join()
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls == 1
        for variable in made:
            np.testing.assert_array_equal(np.asarray(variable.value), [-1.0] * 3)


def test_look_that_fails_is_followed_by_others(monkeypatch) -> None:
    monkeypatch.setattr(coordinated_workers, "_LOOK_S", 0.01)
    looked = threading.Event()
    errors: list[Exception] = [OSError("no descriptors"), UnavailableError("lost")]

    def workers() -> tuple[list[int], list[int], int]:
        if errors:
            raise errors.pop()
        looked.set()
        return [], [], 0

    client: Any = None
    with StallWatch(client, workers):
        assert looked.wait(120)


# How many functions travel together, and which failures to reach a server are tolerated.


def test_duration_is_that_of_the_longest_call_for_a_while() -> None:
    duration = RecentDuration()
    assert duration.expected_s == math.inf
    duration.note(1.0)
    duration.note(2.0)
    assert duration.expected_s == 2.0
    duration.note(1e-6)
    assert duration.expected_s == pytest.approx(1.8)
    for _ in range(200):
        duration.note(1e-6)
    assert duration.expected_s == 1e-6


def test_other_errors_are_never_tolerated() -> None:
    failures = TransientFailures(5)
    assert not failures.is_tolerated(ValueError("wrong"))
    assert not failures.is_tolerated(ConnectionError("of the user's own"))
    assert not TransientFailures(0).is_tolerated(PSUnavailableError("server 0 is silent"))
