"""Functions on workers: what TensorFlow's own tests of its coordinator ask, and more."""

from __future__ import annotations

import contextlib
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import CancelledError, ClosureInputError, UnavailableError
from stratagem.parameter_server.coordinator import cluster_coordinator as module
from stratagem.parameter_server.coordinator.cluster_coordinator import (
    ClusterCoordinator,
    drawn_progress,
)
from stratagem.parameter_server.coordinator.remote_value import RemoteValueStatus
from stratagem.parameter_server.coordinator.shipping import PerWorkerValues
from stratagem.parameter_server.coordinator.worker import get_current_worker_index
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.launch.waiting import until
from tests.unit.parameter_server.clusters import coordinated, local_strategy
from tests.unit.parameter_server.shared_with_workers import (
    LIMIT_S,
    fail,
    go_on,
    note,
    seen,
    started,
    ten_more,
    wait_to_go_on,
)
from tests.unit.test_rendering import require_plain

pytestmark = pytest.mark.usefixtures("nothing_shared")

# The coordinator


def test_there_is_one_coordinator_a_strategy(coordinator) -> None:
    assert ClusterCoordinator(coordinator.strategy) is coordinator
    assert coordinator.strategy.executor.coordinator is coordinator
    assert coordinator.num_workers == 3
    assert repr(coordinator) == f"ClusterCoordinator(3 of 3 workers, {coordinator.strategy})"
    assert require_plain(coordinator._repr_html_()).texts[:3] == [
        "ClusterCoordinator",
        "workers",
        "3",
    ]
    assert not any(name.startswith("_") for name in dir(coordinator))
    with pytest.raises(ValueError, match="ClusterCoordinator received OneDeviceStrategy"):
        ClusterCoordinator(sg.OneDeviceStrategy("cpu:0"))
    with pytest.raises(ValueError, match="ClusterCoordinator received None"):
        ClusterCoordinator(None)


def test_staleness_is_how_many_updates_came_since_values_were_read() -> None:
    with coordinated(num_workers=2, num_servers=1) as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = keras.optimizers.SGD(1.0)
            optimizer.build([v])

        def pull() -> None:
            sg.get_strategy().placement.remote.variables.client.pull([v.place.name])

        def push() -> None:
            name = v.place.name
            client = sg.get_strategy().placement.remote.variables.client
            client.push({name: np.ones(2, "float32")}, optimizers={name: "sgd"})

        def update() -> None:
            optimizer.apply([jnp.ones(2)], [v])

        def step() -> None:
            sg.get_strategy().run(update)

        coordinator.schedule(pull, worker=0).fetch()
        for _ in range(3):
            coordinator.schedule(step, worker=1).fetch()
        coordinator.schedule(push, worker=0).fetch()
        assert coordinator.staleness() == {0: 3, 3: 1}
        assert np.asarray(v.value).tolist() == [-4, -4]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"fn": 3}, TypeError, "schedule received fn=3 of type int"),
        ({"fn": fail, "args": 3}, ValueError, "schedule received args of type int"),
        ({"fn": fail, "args": {"a": 1}}, ValueError, "schedule received args of type dict"),
        ({"fn": fail, "worker": 3}, ValueError, "schedule received worker=3"),
        ({"fn": fail, "worker": -1}, ValueError, "schedule received worker=-1"),
    ],
)
def test_wrong_arguments_are_reported(coordinator, arguments, error, words) -> None:
    with pytest.raises(error, match=words):
        coordinator.schedule(**arguments)
    assert coordinator.done()


# Functions


class Adder:
    """Has a method, and can be called."""

    def __init__(self, number: int) -> None:
        self.number = number

    def method(self, other: int) -> int:
        return self.number + other

    __call__ = method


def local_function() -> Any:
    number = 10

    def add(other: int) -> int:
        return other + number

    return add


def local_class() -> Any:
    class Local(Adder):
        """Of a function."""

        def __call__(self, other: int) -> int:
            return super().method(other)

    return Local(10)


_FUNCTIONS: dict[str, Any] = {
    "module": ten_more,
    "local": local_function(),
    "lambda": lambda other: other + 10,
    "method": Adder(10).method,
    "object": Adder(10),
    "object of a local class": local_class(),
    "partial": functools.partial(lambda number, other: number + other, 10),
    "jit": jax.jit(lambda other: other + 10),
    "decorated": functools.wraps(ten_more)(lambda other: ten_more(other)),
}


@pytest.mark.parametrize("function", _FUNCTIONS.values(), ids=_FUNCTIONS)
def test_whatever_can_be_called_is_a_function(coordinator, function) -> None:
    expected = function(1)
    assert coordinator.schedule(function, args=(1,)).fetch() == expected
    assert coordinator.schedule(function, args=[2]).fetch() == expected + 1
    coordinator.join()


def test_arguments_arrive_as_they_were_given(coordinator) -> None:
    def told(*args: Any, **kwargs: Any) -> Any:
        return repr((args, kwargs))

    args = (1, [2.5, None], {"b": "text", "a": (True, {3})}, b"bytes", {1: "one", "two": 2})
    kwargs = {"mode": "fast", "none": None, "names": ["x"]}
    value = coordinator.schedule(told, args=args, kwargs=kwargs)
    assert value.fetch() == repr((args, kwargs))
    assert coordinator.schedule(lambda: 5).fetch() == 5
    assert coordinator.schedule(lambda: 5, args=None, kwargs=None).fetch() == 5


def test_function_and_method_are_sent_once(coordinator) -> None:
    packed: list[str] = []

    class Trainer:
        """Each worker keeps one; notes when it is sent."""

        def __init__(self, num_calls: int) -> None:
            self.num_calls = num_calls

        def __reduce__(self) -> Any:
            packed.append("once")
            return (Trainer, (self.num_calls,))

        def step(self) -> int:
            self.num_calls += 1
            return self.num_calls

    trainer, other = Trainer(0), Trainer(5)

    def function() -> str:
        return type(trainer).__name__

    for worker in (0, 1, 2, 0, 1, 2):
        assert coordinator.schedule(function, worker=worker).fetch() == "Trainer"
    assert packed == ["once"]
    assert [coordinator.schedule(trainer.step, worker=1).fetch() for _ in range(3)] == [1, 2, 3]
    assert [coordinator.schedule(other.step, worker=1).fetch() for _ in range(2)] == [6, 7]


def test_what_cannot_leave_this_process_is_reported(coordinator) -> None:
    thing = threading.Lock()
    for function, args in ((lambda: thing, ()), (ten_more, (thing,))):
        with pytest.raises(TypeError, match="cannot be sent to a worker"):
            coordinator.schedule(function, args=args)
    assert coordinator.done()


# Results as arguments


def test_result_is_an_argument_when_it_is_there(coordinator) -> None:
    first = coordinator.schedule(wait_to_go_on, args=(1,))
    second = coordinator.schedule(ten_more, args=(first,))
    third = coordinator.schedule(
        lambda pair, *, more: (pair, more), args=([first, second],), kwargs={"more": {"a": second}}
    )
    assert started.acquire(timeout=LIMIT_S)
    assert third.status is RemoteValueStatus.NOT_READY
    go_on.set()
    assert third.fetch() == ([1, 11], {"a": 11})
    coordinator.join()


def test_error_of_an_argument_is_reported_as_such(coordinator) -> None:
    failed = coordinator.schedule(fail)
    with pytest.raises(ArithmeticError):
        coordinator.join()
    value = coordinator.schedule(note, args=(failed,))
    with pytest.raises(ClosureInputError, match="An input of note failed: ArithmeticError"):
        coordinator.join()
    with pytest.raises(ClosureInputError) as raised:
        value.fetch()
    assert isinstance(raised.value.__cause__, ArithmeticError)
    assert seen == []


def test_result_of_another_coordinator_is_refused(coordinator) -> None:
    with coordinated() as other:
        foreign = other.schedule(ten_more, args=(1,))
        iterator = iter(other.create_per_worker_dataset(lambda: [1, 2]))
        for value in (foreign, PerWorkerValues([foreign] * 3), iterator):
            with pytest.raises(ValueError, match="an argument that belongs to another coordinator"):
                coordinator.schedule(ten_more, args=(value,))
        other.join()


# Many functions


def test_failed_function_counts_nothing(coordinator) -> None:
    with coordinator.strategy.scope():
        metric = keras.metrics.Sum()

    def function(number: int) -> None:
        sg.get_strategy().run(lambda: metric.update_state(jnp.ones(2)))
        if number == 1:
            fail()

    coordinator.schedule(function, args=(1,))
    with pytest.raises(ArithmeticError):
        coordinator.join()
    coordinator.schedule(function, args=(0,))
    coordinator.join()
    assert float(metric.result()) == 2
    metric.reset_state()
    coordinator.schedule(function, args=(0,))
    coordinator.join()
    assert float(metric.result()) == 2


def run_slowly_once(number: int) -> int:
    """Waits on the worker that starts it first."""
    seen.append(get_current_worker_index())
    return wait_to_go_on(number) if len(seen) == 1 else number


def test_function_of_a_lost_worker_counts_once() -> None:
    with coordinated(num_workers=2) as coordinator:
        with coordinator.strategy.scope():
            metric = keras.metrics.Sum()

        def function() -> int:
            sg.get_strategy().run(lambda: metric.update_state(jnp.ones(3)))
            return run_slowly_once(7)

        value = coordinator.schedule(function)
        assert started.acquire(timeout=LIMIT_S)
        workers, (lost,) = coordinator.workers, seen
        workers.on_lost(lost, "the test says so")
        assert value.fetch() == 7
        assert seen == [lost, 1 - lost]
        go_on.set()  # what it returns now nobody takes
        workers.on_returned(lost, workers.addresses[lost])
        assert coordinator.schedule(get_current_worker_index, worker=lost).fetch() == lost
        coordinator.join()
        assert float(metric.result()) == 3


# The end


def test_closed_coordinator_takes_nothing() -> None:
    with local_strategy() as strategy:
        coordinator = ClusterCoordinator(strategy)
        running = coordinator.schedule(wait_to_go_on)
        assert started.acquire(timeout=LIMIT_S)
        waiting = coordinator.schedule(ten_more, args=(1,))
        closing = threading.Thread(target=strategy.close, daemon=True)
        closing.start()
        for value in (waiting, running):
            with pytest.raises(CancelledError):
                value.fetch()
        closing.join(LIMIT_S / 2)  # the function that runs waits twice as long
        assert not closing.is_alive()
        assert not go_on.is_set()
        go_on.set()
        with pytest.raises(RuntimeError, match=r"Cannot schedule .*: the coordinator is closed"):
            coordinator.schedule(ten_more, args=(1,))


# Workers that are given up


def synchronous_step(coordinator: ClusterCoordinator) -> tuple[Any, Any]:
    """A step of synchronous training that adds up gradients of 1, and its variable."""
    with coordinator.strategy.scope():
        v = sg.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([v])

    def replica_step() -> Any:
        optimizer.apply([jnp.ones(2)], [v])
        return v.value  # so that it is read

    def step() -> None:
        sg.get_strategy().run(replica_step)

    return step, v


def _wait_until_servers_expect(coordinator: ClusterCoordinator, num_needed: int) -> None:
    servers = coordinator.strategy.cluster.servers
    until(lambda: all(server._pushes.mode.num_needed == num_needed for server in servers))


def test_synchronous_updates_wait_for_no_worker_that_was_given_up() -> None:
    with coordinated(num_workers=3, mode=UpdateMode(num_needed=3)) as coordinator:
        step, v = synchronous_step(coordinator)
        workers = coordinator.workers

        def step_on(*indices: int) -> None:
            for index in indices:
                coordinator.schedule(step, worker=index)
            coordinator.join()

        step_on(0, 1, 2)
        workers.on_lost(2, "it died")
        workers.on_given_up(2, UnavailableError("no more restarts"))
        _wait_until_servers_expect(coordinator, 2)
        assert coordinator.present_workers == [0, 1]
        step_on(0, 1)
        assert np.asarray(v.value).tolist() == [-5, -5]
        with pytest.raises(UnavailableError, match="no more restarts"):
            coordinator.schedule(step, worker=2)
        assert (
            coordinator.strategy.placement.remote.variables.mode.num_needed == 2
        )  # of optimizers that come later
        workers.on_returned(2, workers.addresses[2])
        _wait_until_servers_expect(coordinator, 3)
        v.assign(np.asarray(v.value))  # a new process would not know the values of before either
        step_on(0, 1, 2)
        assert np.asarray(v.value).tolist() == [-8, -8]
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls == 0


def test_backup_workers_are_lost_first() -> None:
    with coordinated(num_workers=3, mode=UpdateMode(num_needed=2)) as coordinator:
        step, v = synchronous_step(coordinator)
        for index in range(2):
            coordinator.schedule(step, worker=index)
        coordinator.join()
        for index, num_needed in ((2, 2), (1, 1), (0, 1)):
            coordinator.workers.on_lost(index, "it died")
            coordinator.workers.on_given_up(index, UnavailableError("no more restarts"))
            _wait_until_servers_expect(coordinator, num_needed)
            if index == 1:
                coordinator.schedule(step).fetch()
                assert np.asarray(v.value).tolist() == [-3, -3]
        with pytest.raises(UnavailableError, match="no more restarts"):
            coordinator.join()
        with pytest.raises(UnavailableError, match="no more restarts"):
            coordinator.schedule(step)


# What is drawn while somebody waits for functions.


def note_later(number: int) -> None:
    assert go_on.wait(60)
    note(number)


def test_join_draws_and_raises_as_ever(coordinator, capsys, monkeypatch) -> None:
    @contextlib.contextmanager
    def begun(*arguments):
        with drawn_progress(*arguments) as draw:
            go_on.set()  # functions that ended before are not counted
            yield draw

    monkeypatch.setattr(module, "drawn_progress", begun)
    for number in range(5):
        coordinator.schedule(note_later, args=(number,))
    coordinator.join(progress=True)
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert "5/5" in capsys.readouterr().err
    coordinator.schedule(fail)
    with pytest.raises(ArithmeticError, match="on purpose"):
        coordinator.join(progress=True)
    coordinator.join(progress=True)
