"""Optimizers whose variables are on parameter servers, beside themselves on one device."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.client.variable_client import Scalar
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.parameter_server.clusters import coordinated
from tests.unit.parameter_server.keras.trained_models import (
    IDS,
    NUM_STEPS,
    X,
    Y,
    assert_same,
    dense_model,
    gradients_of,
    table_model,
)

optimizers = keras.optimizers


def train(strategy: Any, model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """One step; the losses of its replicas."""

    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients_of(model, x, y)
        optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return loss

    count = strategy.num_replicas_in_sync
    parts = [
        strategy.distribute_values_from_function(
            lambda context, rows=rows: np.split(rows, count)[context.replica_id_in_sync_group]
        )
        for rows in (x, y)
    ]
    return strategy.run(step, args=tuple(parts))


def train_on_worker(coordinator: ClusterCoordinator, model: Any, optimizer: Any) -> Callable:
    """What has a worker make one step and waits for it."""

    def function(x: Any, y: Any) -> Any:
        return train(sg.get_strategy(), model, optimizer, x, y)

    return lambda x, y: coordinator.schedule(function, args=(x, y)).fetch()


def check(
    make_model: Callable[[], Any],
    make_optimizer: Callable[[], Any],
    data: Any,
    **cluster: Any,
) -> None:
    """Compares some steps of a worker with those of as many devices of this process."""
    count = cluster.get("devices_per_worker", 1)
    devices = [f"cpu:{place}" for place in range(count)]
    local = sg.MirroredStrategy(devices) if count > 1 else sg.OneDeviceStrategy("cpu:0")
    with local.scope():
        model, optimizer = make_model(), make_optimizer()
    with coordinated(**cluster) as coordinator:
        with coordinator.strategy.scope():
            served, of_served = make_model(), make_optimizer()
        step = train_on_worker(coordinator, served, of_served)
        for x, y in zip(data, Y, strict=True):
            expected = train(local, model, optimizer, x, y)
            jax.tree.map(
                lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4),
                jax.tree.leaves(step(x, y)),
                jax.tree.leaves(expected),
            )
        assert_same(served.variables, model.variables)
        assert_same(of_served.variables, optimizer.variables)
        assert int(of_served.iterations) == int(optimizer.iterations)


DENSE: dict[str, Callable[[], Any]] = {
    "adam": lambda: optimizers.Adam(0.05),
    "global_clipnorm": lambda: optimizers.Adam(0.05, global_clipnorm=0.1),
    "clipvalue": lambda: optimizers.SGD(1.0, clipvalue=0.02),
    "weight_decay": lambda: optimizers.AdamW(0.05, weight_decay=0.3),
    "accumulation_clipvalue": lambda: optimizers.SGD(
        1.0, gradient_accumulation_steps=2, clipvalue=0.02
    ),
    "scaled_loss": lambda: optimizers.SGD(1.0, loss_scale_factor=64.0, clipnorm=0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_worker_trains_as_one_device_does(name) -> None:
    check(dense_model, DENSE[name], X)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled_loss", "adam"])
def test_devices_of_a_worker_train_as_mirrored_ones(name) -> None:
    check(dense_model, DENSE[name], X, devices_per_worker=2)


# Those of which rows that nobody looks up stand still: momentum would move them on one device.
TABLES: dict[str, Callable[[], Any]] = {
    "adagrad": lambda: optimizers.Adagrad(0.1),
    "clipnorm": lambda: optimizers.SGD(10.0, clipnorm=0.02),
    "global_clipnorm": lambda: optimizers.Adagrad(0.1, global_clipnorm=0.02),
    "clipvalue": lambda: optimizers.SGD(10.0, clipvalue=0.003),
    "accumulation": lambda: optimizers.SGD(1.0, gradient_accumulation_steps=2),
    "average": lambda: optimizers.SGD(1.0, use_ema=True, ema_momentum=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_rows_of_tables_are_trained_as_on_one_device(name) -> None:
    check(table_model, TABLES[name], IDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adagrad", "clipnorm", "clipvalue"])
def test_rows_of_tables_in_parts_and_of_several_devices(name) -> None:
    check(
        table_model,
        TABLES[name],
        IDS,
        devices_per_worker=2,
        variable_partitioner=sg.partitioners.FixedShardsPartitioner(3),
    )


def undecayed(model: Any, **options: Any) -> Any:
    optimizer = optimizers.AdamW(0.05, weight_decay=0.5)
    options = {name: select(model) for name, select in options.items()}
    optimizer.exclude_from_weight_decay(**options)
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"var_names": lambda model: ["bias"]},
        {"var_list": lambda model: [model.layers[0].kernel]},
    ],
    ids=["names", "variables"],
)
def test_weight_decay_leaves_out_what_is_excluded(options) -> None:
    made: list[Any] = []

    def make_model() -> Any:
        made.append(dense_model())
        return made[-1]

    partitioner = sg.partitioners.FixedShardsPartitioner(2)
    check(make_model, lambda: undecayed(made[-1], **options), X, variable_partitioner=partitioner)


# Optimizers that are built in different places


@pytest.mark.slow
def test_optimizer_that_a_worker_builds_is_built_here_too() -> None:
    with coordinated(num_workers=2) as coordinator:
        with coordinator.strategy.scope():
            model, optimizer = dense_model(), optimizers.Adam(0.05)
        assert not optimizer.built
        assert float(optimizer.learning_rate.value) == pytest.approx(0.05)
        optimizer.learning_rate = 0.01
        step = train_on_worker(coordinator, model, optimizer)
        for x, y in zip(X, Y, strict=True):
            step(x, y)
        assert optimizer.built
        assert int(optimizer.iterations.value) == NUM_STEPS
        assert isinstance(optimizer.iterations.place, Scalar)
        assert len(optimizer.variables) == 2 + 2 * len(model.trainable_variables)
        moment = optimizer.variables[2].numpy()
        assert moment.shape == model.layers[0].kernel.shape
        assert moment.any()
        assert float(optimizer.learning_rate.value) == pytest.approx(0.01)
        assert optimizer.get_config()["learning_rate"] == pytest.approx(0.01)
        # And what is assigned here is there.
        optimizer.variables[2].assign(np.zeros_like(moment))
        optimizer.learning_rate = 0.0
        before = [v.numpy() for v in model.trainable_variables]
        step(X[0], Y[0])
        for one, other in zip(model.trainable_variables, before, strict=True):
            np.testing.assert_array_equal(one.numpy(), other)
        assert int(optimizer.iterations.value) == NUM_STEPS + 1


def test_number_of_steps_that_was_set_before_is_gone_on_from() -> None:
    def make() -> Any:
        optimizer = optimizers.SGD(optimizers.schedules.ExponentialDecay(1.0, 2, 0.5))
        optimizer.variables[0].assign(7)
        return optimizer

    local = sg.OneDeviceStrategy("cpu:0")
    with local.scope():
        model, optimizer = dense_model(), make()
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            served, of_served = dense_model(), make()
            of_served.build(served.trainable_variables)
        assert int(of_served.iterations.value) == 7
        train_on_worker(coordinator, served, of_served)(X[0], Y[0])
        assert int(of_served.iterations.value) == 8
        train(local, model, optimizer, X[0], Y[0])
        assert_same(served.variables, model.variables)


@pytest.mark.compatibility
def test_updates_are_counted_wherever_the_variables_are() -> None:
    with coordinated(num_servers=3) as coordinator:
        with coordinator.strategy.scope():
            sg.Variable(np.zeros(2, "float32"), trainable=False)  # the only one of its server
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)

        def step() -> None:
            optimizer.apply([jnp.ones(2)], [v])

        for _ in range(3):
            coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert int(optimizer.iterations.value) == 3
        assert v.numpy().tolist() == [-3, -3]


@pytest.mark.slow
def test_moving_average_of_the_weights_is_what_fit_leaves() -> None:
    x, y = np.concatenate(IDS), np.concatenate(Y)

    def fit(model: Any) -> Any:
        model.compile(optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5), "mse")
        model.fit(x, y, batch_size=40, epochs=3, shuffle=False, verbose=0)

    alone = table_model()
    fit(alone)
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            model = table_model()
            fit(model)
        assert_same(model.variables, alone.variables)


# Parts of the variables


def test_frozen_variables_stay_as_they_are() -> None:
    def make() -> Any:
        model = dense_model()
        model.layers[0].trainable = False
        return model

    check(make, lambda: optimizers.Adam(0.05), X)


def test_variables_without_a_gradient_are_left_alone() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v, w = (sg.Variable(np.ones(2, "float32")) for _ in range(2))
            optimizer = optimizers.SGD(1.0, momentum=0.5)
            optimizer.build([v, w])

        def step(*grads: Any) -> None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Keras says which have none
                optimizer.apply(list(grads), [v, w])

        def function(*grads: Any) -> None:
            sg.get_strategy().run(step, args=grads)

        ones = np.ones(2, "float32")
        coordinator.schedule(function, args=(ones, ones)).fetch()
        coordinator.schedule(function, args=(ones, None)).fetch()
        assert v.numpy().tolist() == [-1.5, -1.5]
        assert w.numpy().tolist() == [0, 0]
        coordinator.schedule(function, args=(None, None))
        with pytest.raises(ValueError, match="No gradients provided for any variable"):
            coordinator.join()
        coordinator.schedule(lambda: sg.get_strategy().run(lambda: optimizer.apply([], [])))
        coordinator.join()
        assert int(optimizer.iterations.value) == 2


def test_gradients_that_are_reduced_already_are_not_summed_again() -> None:
    with coordinated(devices_per_worker=2) as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.zeros(2, "float32"))
            optimizer = optimizers.SGD(1.0)
            optimizer.build([v])

        def step() -> None:
            grad = sg.get_replica_context().all_reduce("mean", jnp.full(2, 3.0))
            sg.apply_gradients(optimizer, [(grad, v)], skip_gradients_aggregation=True)

        coordinator.schedule(lambda: sg.get_strategy().run(step)).fetch()
        assert v.numpy().tolist() == [-3, -3]


@pytest.mark.parametrize("is_in_scope", [True, False])
def test_plain_gradients_at_the_coordinator_update_what_servers_hold(is_in_scope: bool) -> None:
    with coordinated(num_servers=2) as coordinator:
        scope = coordinator.strategy.scope
        with scope():
            v = keras.Variable(np.arange(4.0, dtype="float32"))
            optimizer = optimizers.SGD(0.5, momentum=0.5)
        for _ in range(2):
            with scope() if is_in_scope else contextlib.nullcontext():
                optimizer.apply([jnp.ones(4)], [v])
        assert np.asarray(v).tolist() == [-1.25, -0.25, 0.75, 1.75]
        assert int(optimizer.iterations) == 2


@pytest.mark.slow
def test_own_train_step_averages_over_the_devices_of_a_worker() -> None:
    class Own(keras.Model):
        """Computes its loss itself, as the mean over its part of the batch."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = keras.layers.Dense(2)

        def call(self, x: Any) -> Any:
            return self.layer(x)

        def train_step(self, state: Any, data: Any) -> Any:
            return super().train_step(state, data)

    x, y = np.concatenate(X)[:19], np.concatenate(Y)[:19]  # the last batch has 3 rows

    def fit() -> Any:
        keras.utils.set_random_seed(1)
        model = Own()
        model.compile(optimizers.SGD(0.5), "mse")
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
        return model

    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        expected = fit()
    with coordinated(devices_per_worker=2) as coordinator, coordinator.strategy.scope():
        assert_same(fit().variables, expected.variables)


# What is refused


def refused(
    error: type[Exception], words: str, optimizer: Callable[[], Any], step: Any = None
) -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v, w = (sg.Variable(np.ones((2, 3), "float32")) for _ in range(2))
            made = optimizer()

        def plain() -> None:
            made.apply([jnp.ones((2, 3))], [v])

        def function() -> None:
            own = plain if step is None else lambda: step(made, v, w)
            sg.get_strategy().run(own)

        coordinator.schedule(function)
        with pytest.raises(error, match=words):
            coordinator.join()


def test_optimizer_that_accumulates_and_clips_is_refused() -> None:
    words = "accumulates gradients and clips their norm"
    make = lambda: optimizers.SGD(clipnorm=1.0, gradient_accumulation_steps=2)  # noqa: E731
    refused(NotImplementedError, words, make)


def test_scaling_optimizer_that_a_worker_builds_is_refused() -> None:
    words = r"was built in a function on a worker[\s\S]*build\(variables\) before"
    refused(RuntimeError, words, lambda: optimizers.LossScaleOptimizer(optimizers.SGD()))


def test_optimizer_with_arrays_of_other_shapes_is_refused() -> None:
    with coordinated() as coordinator:
        with coordinator.strategy.scope():
            v = sg.Variable(np.ones((2, 3), "float32"))
            optimizer = optimizers.Adafactor()
            optimizer.build([v])
        with pytest.raises(NotImplementedError, match="whose shapes do not match its variables"):
            coordinator.schedule(lambda: optimizer.apply([np.ones((2, 3))], [v]))


def test_variable_that_the_optimizer_was_not_built_for_is_refused() -> None:
    def step(optimizer: Any, v: Any, w: Any) -> None:
        optimizer.apply([jnp.ones((2, 3))], [v])
        optimizer.apply([jnp.ones((2, 3))], [w])

    refused(ValueError, "but was not built for them", lambda: optimizers.SGD(), step)


def test_update_in_a_loop_of_the_program_is_refused() -> None:
    def step(optimizer: Any, v: Any, w: Any) -> None:
        optimizer.build([v, w])

        def update(count: Any, _: Any) -> Any:
            optimizer.apply([jnp.ones((2, 3)), jnp.ones((2, 3))], [v, w])
            return count, None

        jax.lax.scan(update, 0, length=2)

    refused(ValueError, "was applied inside lax.cond", lambda: optimizers.SGD(), step)
