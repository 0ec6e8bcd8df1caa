"""What steps on several workers do to variables on parameter servers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import io_callback

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.strategy.parameter_server_strategy import ParameterServerStrategy
from tests.parameter_server.clusters import coordinated

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.compatibility,
]

START = np.arange(6, dtype="float32").reshape(2, 3)
_LIMIT_S = 60.0
_both = threading.Barrier(2)


def _meet() -> None:
    """Called in a step: returns when a step of the other worker has come so far, too."""
    _both.wait(_LIMIT_S)


def meet() -> None:
    """Has both workers read their values before either of them writes."""
    io_callback(_meet, None)


@pytest.fixture(scope="module")
def coordinator() -> Iterator[ClusterCoordinator]:
    """Of two workers and two servers."""
    with coordinated(num_workers=2) as made:
        yield made


@pytest.fixture
def strategy(coordinator: ClusterCoordinator) -> ParameterServerStrategy:
    """The strategy of that cluster."""
    return coordinator.strategy


def on_both(coordinator: ClusterCoordinator, step: Any) -> None:
    """Runs a step on both workers at the same time."""
    for worker in (0, 1):
        coordinator.schedule(lambda: sg.get_strategy().run(step), worker=worker)
    coordinator.join()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["add"], 10.0 + 2 * 3),
        (["add", "add"], 10.0 + 4 * 3),
        (["subtract", "add"], 10.0),
        (["set"], 5.0),
        (["set", "add"], 8.0),  # of each worker: nobody adds to what the other one has set
        (["add", "set"], 5.0),
        (["set", "subtract", "add", "add"], 8.0),
    ],
    ids=lambda names: "_then_".join(names) if isinstance(names, list) else "",
)
@pytest.mark.parametrize("is_differentiated", [False, True], ids=["plain", "differentiated"])
def test_two_steps_at_once(coordinator, strategy, names, expected, is_differentiated) -> None:
    with strategy.scope():
        v = sg.Variable(np.full(2, 10.0, "float32"), trainable=False)
        w = sg.Variable(np.ones(2, "float32"))

    def change() -> Any:
        for name in names:
            if name == "set":
                v.assign(jnp.full(2, 5.0))
            elif name == "add":
                v.assign_add(jnp.full(2, 3.0))
            else:
                v.assign_sub(jnp.full(2, 3.0))
        return jnp.sum(w.value)

    def step() -> None:
        meet()
        if is_differentiated:
            sg.value_and_grad(change, [w])
        else:
            change()

    on_both(coordinator, step)
    assert v.numpy().tolist() == [expected] * 2


def test_counters_of_ints_count_all_workers(coordinator, strategy) -> None:
    with strategy.scope():
        counts = sg.Variable(np.array([0, 250], "uint8"), trainable=False)

    def step() -> None:
        meet()
        counts.assign_add(jnp.asarray([1, 3], "uint8"))

    on_both(coordinator, step)
    assert counts.numpy().tolist() == [2, 0]  # as 8 bits hold it


def test_averages_of_batch_normalization_are_moved_by_both_workers(coordinator, strategy) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(i, 1, (8, 3)).astype("float32") for i in (1, 2)]
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.9)
        layer.build((None, 3))

    def step(x: Any) -> None:
        meet()
        layer(x, training=True)

    def function(x: Any) -> None:
        sg.get_strategy().run(step, args=(x,))

    for worker, rows in enumerate(batches):
        coordinator.schedule(function, args=(rows,), worker=worker)
    coordinator.join()
    moved = 0.1 * sum(rows.mean(0) for rows in batches)
    np.testing.assert_allclose(layer.moving_mean.numpy(), moved, rtol=1e-5)
    moved = 0.1 * sum(rows.var(0) - 1 for rows in batches)
    np.testing.assert_allclose(layer.moving_variance.numpy(), 1 + moved, rtol=1e-5)


def test_averages_over_the_devices_of_a_worker_are_those_of_mirrored_ones() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(i, 1, (8, 3)).astype("float32") for i in range(3)]

    def make() -> Any:
        layer = keras.layers.BatchNormalization(momentum=0.5)
        layer.build((None, 3))
        return layer

    def train(strategy: Any, layer: Any, rows: Any) -> None:
        parts = strategy.distribute_values_from_function(
            lambda context: rows[4 * context.replica_id_in_sync_group :][:4]
        )
        strategy.run(lambda x: layer(x, training=True) is None, args=(parts,))

    mirrored = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with mirrored.scope():
        expected = make()
    with coordinated(devices_per_worker=2) as coordinator:
        with coordinator.strategy.scope():
            layer = make()
        for rows in batches:
            train(mirrored, expected, rows)
            coordinator.schedule(
                lambda rows: train(sg.get_strategy(), layer, rows), args=(rows,)
            ).fetch()
        for one, other in zip(layer.variables, expected.variables, strict=True):
            np.testing.assert_allclose(one.numpy(), other.numpy(), rtol=1e-5)


def test_step_that_fails_leaves_values_alone(coordinator, strategy) -> None:
    with strategy.scope():
        v = sg.Variable(START)

    def fail() -> None:
        raise ArithmeticError("in the program")

    def step() -> None:
        v.assign_add(START)
        io_callback(fail, None)

    coordinator.schedule(lambda: sg.get_strategy().run(step))
    with pytest.raises(Exception, match="in the program"):
        coordinator.join()
    np.testing.assert_array_equal(v.numpy(), START)
    assert coordinator.schedule(lambda: v.value).fetch().tolist() == START.tolist()


def test_assignment_is_seen_by_the_next_step(coordinator, strategy) -> None:
    with strategy.scope():
        v = sg.Variable(np.zeros(2, "float32"))
        optimizer = keras.optimizers.SGD(1.0)

    def step() -> Any:
        value = v.value
        optimizer.apply([jnp.ones(2)], [v])
        return value

    def function() -> Any:
        return sg.get_strategy().run(step)

    seen = []
    for start in range(5):
        v.assign(np.full(2, 10.0 * start))
        seen.append(coordinator.schedule(function, worker=0).fetch()[0])
    assert seen == [0, 10, 20, 30, 40]
    assert v.numpy().tolist() == [39, 39]
