"""What steps on several workers do to variables on parameter servers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import io_callback

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from stratagem.parameter_server.server.shards import UpdateMode
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.keras.trained_models import assert_same

START = np.arange(6, dtype="float32").reshape(2, 3)
_LIMIT_S = 60.0
_both = threading.Barrier(2)


def _meet() -> None:
    """Called in a step: returns when a step of the other worker has come so far, too."""
    _both.wait(_LIMIT_S)


def meet() -> None:
    """Has both workers read their values before either of them writes."""
    io_callback(_meet, None)


def on_both(coordinator: ClusterCoordinator, step: Any) -> None:
    """Runs a step on both workers at the same time."""
    for worker in (0, 1):
        coordinator.schedule(lambda: sg.get_strategy().run(step), worker=worker)
    coordinator.join()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        pytest.param(["add"], 10.0 + 2 * 3, marks=pytest.mark.compatibility),
        (["subtract", "add"], 10.0),
        (["set"], 5.0),
        (["add", "set"], 5.0),
        # Of each worker: nobody adds to what the other one has set.
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


@pytest.mark.compatibility
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


@pytest.mark.compatibility
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


class Parts:
    """What the steps below use: layers, optimizers and a copy of the weights."""

    def __init__(self) -> None:
        self.dense = keras.layers.Dense(2, kernel_initializer="ones")
        self.dense.build((None, 3))
        self.table = keras.layers.Embedding(9000, 8, embeddings_initializer="ones")
        self.table.build(())
        self.teacher = sg.Variable(np.zeros((3, 2), "float32"), trainable=False)
        self.first, self.second = keras.optimizers.Adam(0.1), keras.optimizers.SGD(0.5, 0.9)
        self.trained = [*self.dense.trainable_variables, self.table.embeddings]
        self.first.build(self.trained)
        self.second.build(self.trained[:2])

    @property
    def kernel(self) -> Any:
        return self.dense.kernel

    def loss(self) -> Any:
        rows = jnp.asarray([0, 5, 5])
        x = self.table(rows)[:, :3]
        return jnp.mean((self.dense(x) - 5) ** 2) / get_num_parts()

    def train(self, optimizer: Any, variables: list[Any]) -> Any:
        loss, gradients = sg.value_and_grad(self.loss, variables)
        optimizer.apply(gradients, variables)
        return loss * get_num_parts()

    @property
    def variables(self) -> list[Any]:
        optimizers = [*self.first.variables, *self.second.variables]
        return [*self.trained, self.teacher, *optimizers]


def get_num_parts() -> int:
    """How many workers give a part of each gradient."""
    strategy: Any = sg.get_strategy()
    remote = strategy.placement.remote
    return max(1, remote.variables.mode.num_needed) if remote else 1


def clipped_after(one: Parts) -> Any:
    one.train(one.first, one.trained)
    one.kernel.assign(jnp.clip(one.kernel.value, 0.95, 1.15))


def set_before(one: Parts) -> Any:
    one.kernel.assign(one.kernel.value * 0.5)
    one.train(one.first, one.trained)


def set_after_gradients(one: Parts) -> Any:
    _, gradients = sg.value_and_grad(one.loss, one.trained)
    one.kernel.assign(one.kernel.value / jnp.linalg.norm(one.kernel.value))
    one.first.apply(gradients, one.trained)
    one.kernel.assign(one.kernel.value / jnp.linalg.norm(one.kernel.value))


def set_in_the_loss(one: Parts) -> Any:
    def loss() -> Any:
        one.kernel.assign(one.kernel.value * 0.9)
        return one.loss()

    _, gradients = sg.value_and_grad(loss, one.trained)
    one.first.apply(gradients, one.trained)


def decayed_apart(one: Parts) -> Any:
    one.kernel.assign_add(jnp.full((3, 2), 0.25))
    one.train(one.second, one.trained[:2])
    one.kernel.assign_sub(one.kernel.value * 0.1)


def two_in_turn(one: Parts) -> Any:
    one.train(one.first, one.trained)
    one.train(one.second, one.trained[:2])
    return one.train(one.first, one.trained)


def set_between(one: Parts) -> Any:
    _, gradients = sg.value_and_grad(one.loss, one.trained)
    one.first.apply(gradients, one.trained)
    one.kernel.assign(jnp.ones((3, 2)))
    one.first.apply(gradients, one.trained)


def followed_by_a_teacher(one: Parts) -> Any:
    one.train(one.first, one.trained)
    one.teacher.assign(0.5 * one.teacher.value + 0.5 * one.kernel.value)
    return jnp.sum(one.kernel.value)


def rows_read_again(one: Parts) -> Any:
    one.train(one.first, one.trained)
    return one.table(jnp.asarray([5, 7]))


def table_scaled_after(one: Parts) -> Any:
    one.train(one.first, one.trained)
    table = one.table.embeddings
    table.assign(jnp.minimum(table.value, 1.05))


def table_set_before(one: Parts) -> Any:
    one.table.embeddings.assign(one.table.embeddings.value * 0.9)
    one.train(one.first, one.trained)


def rate_set_before(one: Parts) -> Any:
    one.second.learning_rate.assign(one.second.learning_rate.value * 0.5)
    one.train(one.second, one.trained[:2])
    return one.second.iterations.value.astype("float32") * one.second.learning_rate.value


def momentum_reset(one: Parts) -> Any:
    one.train(one.second, one.trained[:2])
    momentum = one.second.momentums[0]
    momentum.assign(jnp.where(momentum.value < 0, momentum.value, 0))


STEPS = [
    clipped_after,
    set_before,
    set_after_gradients,
    set_in_the_loss,
    decayed_apart,
    two_in_turn,
    set_between,
    followed_by_a_teacher,
    rows_read_again,
    table_scaled_after,
    table_set_before,
    rate_set_before,
    momentum_reset,
]
CLUSTERS: dict[str, dict[str, Any]] = {
    "one": {},
    "bounded": {"mode": UpdateMode(max_staleness=0), "num_servers": 1},
    "together": {"num_workers": 2, "mode": UpdateMode(2)},
    "two devices": {"devices_per_worker": 2},
}


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, ClusterCoordinator]]:
    """Those of the tests below, made where they are asked for."""
    with contextlib.ExitStack() as stack:
        yield _Made(stack)


class _Made(dict[str, ClusterCoordinator]):
    def __init__(self, stack: contextlib.ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, name: str) -> ClusterCoordinator:
        self[name] = self._stack.enter_context(coordinated(**CLUSTERS[name]))
        return self[name]


@pytest.mark.parametrize(
    "cluster",
    [
        "one",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CLUSTERS if name != "one"),
    ],
)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_assignments_and_updates_keep_their_order(clusters, step, cluster) -> None:
    is_split = cluster == "two devices"
    alone: Any = (
        sg.MirroredStrategy(["cpu:0", "cpu:1"]) if is_split else sg.OneDeviceStrategy("cpu:0")
    )
    with alone.scope():
        expected = Parts()
    results = [alone.run(step, args=(expected,)) for _ in range(3)]
    coordinator = clusters[cluster]
    with coordinator.strategy.scope():
        served = Parts()

    def on_worker() -> Any:
        return sg.get_strategy().run(step, args=(served,))

    for result in results:
        futures = [
            coordinator.schedule(on_worker, worker=worker)
            for worker in range(coordinator.num_workers)
        ]
        coordinator.join()
        for future in futures:
            for one, two in zip(
                jax.tree.leaves(future.fetch()), jax.tree.leaves(result), strict=True
            ):
                np.testing.assert_allclose(np.asarray(one) * 1, np.asarray(two), rtol=1e-5)
    assert_same(served.variables, expected.variables, rtol=1e-5)
