"""Synchronous updates that nobody would complete."""

from __future__ import annotations

import functools
import threading
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.errors import UnavailableError
from stratagem.parameter_server.coordinator.coordinated_workers import StallWatch, is_stalled
from stratagem.parameter_server.server.updates import UpdateMode
from tests.unit.parameter_server.clusters import coordinated


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


def _step(strategy: Any) -> tuple[Any, Any]:
    with strategy.scope():
        variable = sg.Variable(np.zeros(3, "float32"))
        optimizer = keras.optimizers.SGD(1.0)

    def replica_step() -> None:
        _, gradients = sg.value_and_grad(lambda: variable.value.sum(), [variable])
        optimizer.apply_gradients(zip(gradients, [variable], strict=True))

    def step() -> None:
        strategy.run(replica_step)

    return step, variable


def test_step_that_is_left_alone_is_made_in_the_end() -> None:
    """Three steps on two workers: the last one has nobody to wait for."""
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        step, variable = _step(coordinator.strategy)
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls >= 1
        np.testing.assert_array_equal(np.asarray(variable.value), [-3.0] * 3)


@pytest.mark.slow
def test_functions_that_only_one_worker_may_run_are_no_hope_for_it() -> None:
    with coordinated(num_workers=2, mode=UpdateMode(num_needed=2)) as coordinator:
        step, variable = _step(coordinator.strategy)
        for _ in range(2):
            coordinator.schedule(step, worker=0)
        coordinator.join()
        assert coordinator.stalls is not None
        assert coordinator.stalls.num_stalls == 2
        np.testing.assert_array_equal(np.asarray(variable.value), [-2.0] * 3)


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
