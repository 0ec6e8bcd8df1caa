"""Threads of the coordinator that keep one worker busy."""

from __future__ import annotations

import collections
import functools
import math
import pickle
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.errors import (
    ClosureInputError,
    OutOfRangeError,
    PSUnavailableError,
    UnavailableError,
)
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.wire import Message, pack, unpack
from stratagem.parameter_server.client.variable_client import VariableOnWorkerError
from stratagem.parameter_server.coordinator.closure_queue import ClosureQueue, WaitingWorkers
from stratagem.parameter_server.coordinator.coordinated_workers import (
    StallWatch,
    TransientFailures,
    WorkerLink,
    is_stalled,
)
from stratagem.parameter_server.coordinator.remote_value import Closure, leaves_of, map_structure
from stratagem.parameter_server.coordinator.shipping import (
    MAX_UNANSWERED,
    DatasetVariableError,
    Ended,
    RecentDuration,
    Scheduling,
    SentCall,
    WorkerReport,
    calls_in,
    ended_in,
    failed_message,
    merge_reports,
    pack_calls,
    pack_ended,
)
from stratagem.parameter_server.keras.pickling import KERAS_PACKING
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.coordinator.test_cluster_coordinator import synchronous_step


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


def test_step_that_is_left_alone_is_made_in_the_end() -> None:
    """Three steps on two workers: the last one has nobody to wait for."""
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        step, variable = synchronous_step(coordinator)
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls >= 1
        np.testing.assert_array_equal(np.asarray(variable.value), [-3.0] * 2)


@pytest.mark.slow
def test_functions_that_only_one_worker_may_run_are_no_hope_for_it() -> None:
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        step, variable = synchronous_step(coordinator)
        for _ in range(2):
            coordinator.schedule(step, worker=0)
        coordinator.join()
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls == 2
        np.testing.assert_array_equal(np.asarray(variable.value), [-2.0] * 2)


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


def test_look_that_fails_is_followed_by_others() -> None:
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


# Workers that wait for closures, and the one that is woken.


class Waiting:
    """Workers in threads of their own, each of which waits once."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.workers = WaitingWorkers(self.lock)
        self.woken: list[int] = []
        self._changed = threading.Condition(self.lock)

    def begin(self, worker: int, is_busy: Callable[[], bool] = lambda: False) -> None:
        """Returns once the worker waits."""
        waits = threading.Event()

        def wait() -> None:
            with self.lock:
                waits.set()  # others get the lock once it waits
                self.workers.wait(worker, is_busy)
                self.woken.append(worker)
                self._changed.notify_all()

        threading.Thread(target=wait, daemon=True).start()
        assert waits.wait(120)
        with self.lock:
            pass

    def require_woken(self, wanted: list[int], wake: Callable[..., Any], *args: Any, **kwargs: Any):
        """Calls a method, which wakes these workers."""
        with self.lock:
            before = len(self.woken)
            wake(*args, **kwargs)
            assert self._changed.wait_for(lambda: len(self.woken) >= before + len(wanted), 120)
            assert not self._changed.wait_for(lambda: len(self.woken) > before + len(wanted), 0.02)
            assert self.woken[before:] == wanted


@pytest.fixture
def crew() -> Waiting:
    return Waiting()


def test_last_idle_worker_comes_first_and_then_the_last_busy_one(crew) -> None:
    for worker in (3, 1):
        crew.begin(worker)
    for worker in (0, 2):
        crew.begin(worker, lambda: True)
    for wanted in ([1], [3], [2], [0], []):
        crew.require_woken(wanted, crew.workers.wake_one, may_be_busy=True)


def test_busy_worker_is_left_alone_if_it_may_not_be_busy(crew) -> None:
    crew.begin(0, lambda: True)
    crew.require_woken([], crew.workers.wake_one, may_be_busy=False)
    crew.require_woken([0], crew.workers.wake, 0)
    crew.require_woken([], crew.workers.wake, 0)


def test_one_worker_is_woken_at_a_time(crew) -> None:
    for worker in (0, 1):
        crew.begin(worker)

    def wake_twice() -> None:
        for _ in range(2):
            crew.workers.wake_one(may_be_busy=True)

    crew.require_woken([1], wake_twice)
    crew.require_woken([0], crew.workers.wake_one, may_be_busy=True)


def test_busy_worker_that_has_finished_is_idle(crew) -> None:
    is_busy = True
    crew.begin(0, lambda: is_busy)
    crew.workers.note_finished(0)
    crew.require_woken([], crew.workers.wake_one, may_be_busy=False)
    is_busy = False
    crew.workers.note_finished(0)
    crew.require_woken([0], crew.workers.wake_one, may_be_busy=False)


def test_all_are_woken(crew) -> None:
    crew.begin(0)
    crew.begin(1, lambda: True)
    with crew.lock:
        crew.workers.wake_all()
        crew._changed.wait_for(lambda: len(crew.woken) == 2, 120)
    assert sorted(crew.woken) == [0, 1]


# Messages of several calls, and how many travel together.


def sent(message: Message) -> Message:
    """The message on the other side."""
    return unpack([bytes(frame) for frame in pack(message)])


@pytest.mark.parametrize("packed", [[b"a"], [b"first", b"", b"x" * 100_000]])
def test_calls_arrive_in_their_order(packed) -> None:
    calls = [SentCall(7, 20 + i, i % 2 == 0, one) for i, one in enumerate(packed)]
    message = sent(pack_calls(calls, {"order": 3}))
    assert message.fields["order"] == 3
    assert [
        SentCall(one.function, one.closure, one.is_rerun, bytes(one.packed))
        for one in calls_in(message)
    ] == calls


def test_outcomes_arrive_with_the_counts_of_their_calls() -> None:
    ended = [
        Ended(b"result", 0.25, {4: np.float32([1, 2]), 9: np.float32(3)}),
        Ended(b"no counts", 3e-6),
        Ended(b"result", 0.0, {9: np.float32(5)}),
        Ended(b"error", trace="Traceback"),
    ]
    got = list(ended_in(sent(pack_ended(ended, {"losses": {}}))))
    assert [bytes(one.packed) for one in got] == [b"result", b"no counts", b"result", b"error"]
    assert [one.duration_s for one in got] == [0.25, 3e-6, 0.0, 0.0]
    assert [one.trace for one in got] == [None, None, None, "Traceback"]
    assert [list(one.counted) for one in got] == [[4, 9], [], [9], []]
    np.testing.assert_array_equal(got[0].counted[4], [1, 2])
    assert got[2].counted[9] == 5


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


# Structures of arguments and results.

Pair = collections.namedtuple("Pair", ["first", "second"])


class Leaf:
    """What JAX does not know."""


LEAF = Leaf()
STRUCTURES: list[tuple[Any, Any]] = [
    (1, "1"),
    (None, None),
    ([1, (2, None), []], ["1", ("2", None), []]),
    ({"b": 1, 2: {"a": [3]}}, {"b": "1", 2: {"a": ["3"]}}),
    (Pair(1, {"x": 2}), Pair("1", {"x": "2"})),
    (collections.OrderedDict(b=1, a=2), collections.OrderedDict(b="1", a="2")),
]


@pytest.mark.parametrize(("value", "expected"), STRUCTURES)
def test_leaves_are_replaced_and_structures_kept(value, expected) -> None:
    got = map_structure(str, value)
    assert got == expected
    assert type(got) is type(expected)
    assert repr(got) == repr(expected)  # in the same order


def test_what_is_declared_a_leaf_is_not_taken_apart() -> None:
    def is_leaf(value: Any) -> bool:
        return isinstance(value, tuple | Leaf)

    assert map_structure(lambda leaf: leaf, [LEAF, (1, 2)], is_leaf) == [LEAF, (1, 2)]
    assert leaves_of({"b": (1, 2), "a": [3, None, LEAF]}, is_leaf) == [(1, 2), 3, LEAF]


# Errors of workers, as they are sent and as they are raised.


def _sent(error: BaseException, *, is_input: bool = False) -> BaseException:
    return pickle.loads(failed_message(error, is_input=is_input).arrays[0].tobytes())


def test_reports_of_one_error_are_merged_and_addresses_do_not_count() -> None:
    first, same, other = (KeyError("a") for _ in range(3))
    WorkerReport(first, 2, "<f at 0x7f01>")
    WorkerReport(same, 0, "<f at 0x7f02>")
    WorkerReport(other, 1, "<g at 0x7f01>")
    for later in (same, other, ValueError("of no worker")):
        merge_reports(first, later)
    assert first.__notes__ == ["Raised on workers 0 and 2:\n<f at 0x7f01>"]
    merge_reports(ValueError("of no worker"), same)
    assert same.__notes__ == ["Raised on worker 0:\n<f at 0x7f02>"]


@pytest.mark.parametrize("error", [StopIteration(), StopAsyncIteration()])
def test_end_of_data_has_a_message(error) -> None:
    sent = _sent(error)
    assert type(sent) is OutOfRangeError
    assert f"raised {type(error).__name__}: its dataset is exhausted" in str(sent)


def test_only_variables_in_dataset_functions_are_value_errors() -> None:
    made = _sent(VariableOnWorkerError("a variable"), is_input=True)
    assert type(made) is DatasetVariableError
    assert isinstance(made, ValueError)
    assert isinstance(made, ClosureInputError)
    failed = _sent(OSError("no file"), is_input=True)
    assert type(failed) is ClosureInputError
    assert not isinstance(failed, ValueError)


# Which failures to reach a server are tolerated.

LOST = PSUnavailableError("server 0 is silent")


def test_other_errors_are_never_tolerated() -> None:
    failures = TransientFailures(5)
    assert not failures.is_tolerated(ValueError("wrong"))
    assert not failures.is_tolerated(ConnectionError("of the user's own"))


def test_none_is_tolerated_unless_it_was_asked_for() -> None:
    assert not TransientFailures(0).is_tolerated(LOST)


# The executor of the coordinator.


def _strategy() -> sg.Strategy:
    executor = functools.partial(Scheduling, packing=KERAS_PACKING)
    return sg.Strategy(Topology(find_devices(["cpu:0"])), executor=executor)


def test_warning_names_the_line_that_called_run() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert _strategy().run(lambda: 3) == 3
    (warning,) = [one for one in found if "runs there" in str(one.message)]
    assert warning.filename == __file__


def test_nothing_is_settled_or_closed_without_a_coordinator() -> None:
    executor = _strategy().executor
    assert isinstance(executor, Scheduling)
    executor.settle()
    executor.close()
    assert executor.coordinator is None


# The interface for pickling between coordinator and workers, and Keras's implementation of it.
