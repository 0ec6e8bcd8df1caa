"""Blocks of scheduled functions in which each variable is read once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.shared_with_workers import forget, go_on, started, wait_to_go_on

NUM_ROWS = 9000  # times 8: large enough for rows to be asked for


@pytest.fixture
def one() -> Iterator[ClusterCoordinator]:
    """Of one worker, with tests that share nothing."""
    forget()
    with coordinated() as made:
        yield made


def _counting_requests(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns on a worker, and how often it asked for values."""
    client = sg.get_strategy().placement.remote.variables.client
    asked: list[Any] = []

    def counted(original: Any) -> Any:
        def ask(*args: Any) -> Any:
            asked.append(args)
            return original(*args)

        return ask

    for name in ("pull", "scalars"):
        setattr(client, name, counted(getattr(client, name)))
    try:
        return function(), len(asked)
    finally:
        del client.pull, client.scalars


def test_value_is_read_once_whatever_others_write_meanwhile(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.ones(3, "float32"))

    def read() -> list[float]:
        with sg.coordinator.cache_variable_reads():
            values = [float(v.value[0])]
            wait_to_go_on()
            values.append(float(v.value[0]))
            step = sg.get_strategy().run(lambda: v.value[0])
            values.append(float(step))
        values.append(float(v.value[0]))
        return values

    observed = one.schedule(read)
    assert started.acquire(timeout=60.0)
    v.assign(np.full(3, 5.0))
    go_on.set()
    assert observed.fetch() == [1, 1, 1, 5]


def test_servers_are_asked_once_for_each_variable(one) -> None:
    with one.strategy.scope():
        v, w = (sg.Variable(np.full(2, i, "float32")) for i in (1, 2))

    def read() -> tuple[Any, int]:
        def reads() -> list[float]:
            strategy = sg.get_strategy()
            observed = []
            for _ in range(4):
                observed.append(float(v.value[0]))
                observed.append(float(strategy.run(lambda: v.value[0] + w.value[1])))
            return observed

        def cached() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                return reads()

        return _counting_requests(reads), _counting_requests(cached)

    plain, cached = one.schedule(read).fetch()
    assert plain == ([1, 3] * 4, 8)
    assert cached == ([1, 3] * 4, 2)


def test_own_assignments_are_seen_and_reach_the_servers(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.ones(2, "float32"))
        w = sg.Variable(np.ones(2, "float32"), trainable=False)

    def change() -> tuple[list[float], int]:
        def changes() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                observed = [float(v.value[0] + w.value[0])]
                v.assign(np.full(2, 4.0))
                observed.append(float(v.value[0]))
                v.assign_add(np.full(2, 2.0))
                observed.append(float(v.value[0]))
                sg.get_strategy().run(lambda: w.assign_sub(jnp.ones(2)))
                observed.append(float(w.value[0]))
                sg.get_strategy().run(lambda: w.assign(v.value * 10))
                observed.append(float(w.value[0]))
                return observed

        return _counting_requests(changes)

    assert one.schedule(change).fetch() == ([2, 4, 6, 0, 60], 2)
    assert np.asarray(v.value).tolist() == [6, 6]
    assert np.asarray(w.value).tolist() == [60, 60]


def test_own_updates_are_seen(one) -> None:
    with one.strategy.scope():
        v = sg.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        optimizer.build([v])

    def train() -> list[float]:
        observed: list[float] = []
        slot = optimizer.momentums[0]
        with sg.coordinator.cache_variable_reads():
            for _ in range(3):
                observed += [float(v.value[0]), float(slot.value[0]), int(optimizer.iterations)]
                sg.get_strategy().run(lambda: optimizer.apply([jnp.ones(2)], [v]))
                optimizer.learning_rate = float(optimizer.learning_rate) * 2
        return observed

    # By hand: the momentum is 0.5 m - lr, with rates of 1, 2 and 4.
    assert one.schedule(train).fetch() == [0, 0, 0, -1, -1, 1, -3.5, -2.5, 2]
    assert np.asarray(v.value).tolist() == [-8.75, -8.75]


def test_step_that_came_too_late_is_run_again_with_new_values() -> None:
    forget()
    with coordinated(mode=UpdateMode(0, 0)) as one:
        with one.strategy.scope():
            v = sg.Variable(np.full(2, 8.0, "float32"))
            optimizer = keras.optimizers.SGD(0.5)
            optimizer.build([v])

        def update() -> None:
            sg.get_strategy().run(lambda: optimizer.apply([v.value], [v]))

        def late() -> list[float]:
            with sg.coordinator.cache_variable_reads():
                before = float(v.value[0])
                wait_to_go_on()
                update()
                return [before, float(v.value[0])]

        observed = one.schedule(late)
        assert started.acquire(timeout=60.0)
        name = v.place.name
        one.strategy.placement.remote.variables.client.push(
            {name: np.full(2, 8.0, "float32")}, optimizers={name: "sgd"}
        )
        go_on.set()
        assert observed.fetch() == [8, 2]  # half of 4, which another one had made of 8


def test_tables_are_asked_for_each_time(one) -> None:
    with one.strategy.scope():
        layer = keras.layers.Embedding(NUM_ROWS, 8, embeddings_initializer="ones")
        layer.build((2,))
    (table,) = layer.variables
    assert table.has_rows

    def read() -> list[float]:
        def observed() -> list[float]:
            step = sg.get_strategy().run(lambda: layer(jnp.asarray([7]))[0, 0])
            return [float(np.asarray(table.value)[7, 0]), float(step)]

        with sg.coordinator.cache_variable_reads():
            values = observed()
            wait_to_go_on()
            return values + observed()

    values = one.schedule(read)
    assert started.acquire(timeout=60.0)
    table.assign(np.full((NUM_ROWS, 8), 3.0, "float32"))
    go_on.set()
    assert values.fetch() == [1, 1, 3, 3]


def test_where_it_may_be_used(one) -> None:
    def nested() -> None:
        with (
            sg.coordinator.cache_variable_reads(),
            pytest.raises(ValueError, match="called inside a block of cache_variable_reads"),
            sg.coordinator.cache_variable_reads(),
        ):
            pass

    def in_step() -> None:
        with sg.coordinator.cache_variable_reads():
            pass

    def steps() -> None:
        sg.get_strategy().run(in_step)

    one.schedule(nested).fetch()
    one.schedule(in_step).fetch()  # the one before has ended
    one.schedule(steps)
    with pytest.raises(RuntimeError, match="cache_variable_reads was called in a replica function"):
        one.join()
    with (
        pytest.raises(RuntimeError, match="was called outside of a scheduled function"),
        sg.coordinator.cache_variable_reads(),
    ):
        pass
