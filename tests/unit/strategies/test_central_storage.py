"""CentralStorageStrategy: one copy of the variables, the same numbers as copies on all devices."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg

TWO, HOST = ["cpu:0", "cpu:1"], "cpu:2"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
Y = RNG.normal(size=(22, 2)).astype("float32")


def central() -> sg.CentralStorageStrategy:
    return sg.CentralStorageStrategy(TWO, HOST)


def made(strategy: sg.Strategy, optimizer: str = "Adam", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(5, activation="tanh", kernel_constraint="max_norm"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3),
                keras.layers.Dense(2, kernel_regularizer="l2"),
            ]
        )
        rule = getattr(keras.optimizers, optimizer)(0.01)
        model.compile(optimizer=rule, loss="mse", metrics=["mae"], **options)
    return model


def parameter_device_of(strategy: sg.Strategy) -> Any:
    with strategy.scope():
        (device,) = devices_of(sg.Variable(1.0).value)
    return device


def devices_of(value: Any) -> set[Any]:
    return value.devices()


@pytest.mark.parametrize(
    ("optimizer", "steps"),
    [
        ("Adam", 3),
        *(
            pytest.param(optimizer, steps, marks=pytest.mark.slow)
            for optimizer, steps in [
                ("SGD", 1),
                ("SGD", 3),
                ("Adam", 1),
                ("Lamb", 1),
                ("Lamb", 3),
                ("Muon", 1),
                ("Muon", 3),
            ]
        ),
    ],
)
def test_fit_gives_what_copies_on_all_devices_give(optimizer, steps) -> None:
    models = [
        made(strategy, optimizer, steps_per_execution=steps)
        for strategy in (sg.MirroredStrategy(TWO), central())
    ]
    histories = [
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history
        for model in models
    ]
    mirrored, own = models
    assert histories[0].keys() == histories[1].keys()
    for name, values in histories[0].items():
        np.testing.assert_allclose(histories[1][name], values, rtol=1e-5)
    for wanted, got in zip(
        mirrored.weights + mirrored.optimizer.variables,
        own.weights + own.optimizer.variables,
        strict=True,
    ):
        np.testing.assert_allclose(got.value, wanted.value, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        own.evaluate(X, Y, verbose=0), mirrored.evaluate(X, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(own.predict(X, verbose=0), mirrored.predict(X, verbose=0), rtol=1e-5)


@pytest.mark.slow
def test_variables_are_on_the_parameter_device_before_and_after_steps() -> None:
    model = made(central())
    (host,) = [device for device in jax.devices() if device.id == 2]
    for num_kept in (9, 21):
        kept = [v for v in model.variables if v.synchronization != "on_read"]
        kept += model.optimizer.variables
        assert len(kept) == num_kept
        for variable in kept:
            assert devices_of(variable.stored) == {host}, variable.path
            assert devices_of(variable.value) == {host}, variable.path
        model.fit(X, Y, batch_size=8, verbose=0)


@pytest.mark.slow
def test_devices_hold_nothing_between_steps() -> None:
    """Counted by device after a step: the weights and what Adam keeps, three large arrays."""
    sizes = {}
    shape = (517, 1031)  # of nothing else in this process
    for name, strategy in {"mirrored": sg.MirroredStrategy(TWO), "central": central()}.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input(shape[:1]), keras.layers.Dense(shape[1])])
            model.compile("adam", "mse")
        model.fit(np.zeros((4, shape[0])), np.zeros((4, shape[1])), batch_size=4, verbose=0)
        held = Counter(
            shard.device.id
            for array in jax.live_arrays()
            if array.shape == shape
            for shard in array.addressable_shards
        )
        sizes[name] = dict(held)
        del model
        gc.collect()
    assert sizes == {"mirrored": {0: 3, 1: 3}, "central": {2: 3}}


def test_loop_of_ones_own_assigns_where_variables_are() -> None:
    strategy = central()
    with strategy.scope():
        weight = sg.Variable(jnp.arange(4.0))
        total = sg.Variable(0.0, synchronization="on_read", aggregation="sum")
    optimizer = keras.optimizers.SGD(0.5)

    def step(x):
        loss, grads = sg.value_and_grad(lambda: jnp.sum(weight * x), [weight])
        optimizer.apply_gradients([(grads[0], weight)])
        total.assign_add(loss)
        return weight.value

    parts = strategy.distribute_values_from_function(
        lambda context: jnp.full(4, context.replica_id_in_sync_group + 1.0)
    )
    result = strategy.run(step, args=(parts,))
    np.testing.assert_allclose(weight.value, np.arange(4.0) - 0.5 * 3.0)
    assert float(total.value) == 6.0 * (1 + 2)
    for part in strategy.local_results(result):
        np.testing.assert_allclose(part, np.arange(4.0) - 0.5 * 3.0)


def test_functions_and_runs_op_by_op_see_the_same_values() -> None:
    strategy = central()
    with strategy.scope():
        value = sg.Variable(1.0, aggregation="sum")

    def step():
        value.assign_add(1.0 * jnp.ones(()))

    @sg.function
    def twice():
        strategy.run(step)
        strategy.run(step)
        return value.value

    assert float(twice()) == 5.0
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    strategy.run(step)
    assert float(value.value) == 9.0
    assert {device.id for device in devices_of(value.stored)} == {2}


@pytest.mark.slow
def test_model_is_called_where_variables_are() -> None:
    model = made(central())
    model.fit(X, Y, batch_size=8, verbose=0)
    called = model(X)
    assert {device.id for device in devices_of(called)} == {2}
    np.testing.assert_allclose(called, model.predict(X, verbose=0), rtol=1e-5, atol=1e-6)


def test_parameter_device_is_the_host_or_the_only_device() -> None:
    several = sg.CentralStorageStrategy(TWO)
    assert parameter_device_of(several) == jax.local_devices(backend="cpu")[0]
    assert parameter_device_of(sg.CentralStorageStrategy("cpu:3")).id == 3
    assert sg.CentralStorageStrategy().num_replicas_in_sync == jax.local_device_count()


def test_parameter_device_is_where_variables_live() -> None:
    extended = central().extended
    assert [device.id for device in extended.parameter_devices] == [2]
    assert [device.id for device in extended.worker_devices] == [0, 1]


def test_update_runs_on_the_only_copy() -> None:
    strategy = central()
    with strategy.scope():
        value = sg.Variable(1.0)
        results = strategy.extended.update(value, lambda v: v.assign_add(2.0), group=False)
    assert [float(result) for result in results] == [3.0]


def test_host_that_jax_leaves_out_is_reported(monkeypatch) -> None:
    devices = jax.devices()[:2]

    def without_host(**_: Any) -> Any:
        raise RuntimeError("Unknown backend: 'cpu' requested")

    monkeypatch.setattr(jax, "local_devices", without_host)
    with pytest.raises(ValueError, match="JAX was told to leave the host out: Unknown backend"):
        sg.CentralStorageStrategy(devices)


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\[\] is empty"):
        sg.CentralStorageStrategy([])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(["cpu:99"])
    with pytest.raises(ValueError, match="cpu:99"):
        sg.CentralStorageStrategy(TWO, "cpu:99")
    with pytest.raises(TypeError, match=r"compute_devices=3 is of type int"):
        sg.CentralStorageStrategy(3)  # pyright: ignore[reportArgumentType]
