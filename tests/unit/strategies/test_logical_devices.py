"""Replicas of several devices: values and variables divided over them, and the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.arguments import flatten_arguments

PAIRS = [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
FOURS = [["cpu:0", "cpu:1", "cpu:2", "cpu:3"], ["cpu:4", "cpu:5", "cpu:6", "cpu:7"]]
LAYOUTS = {".*/kernel": (None, "logical"), ".*/bias": ("logical",)}
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 6)).astype("float32")
Y = RNG.normal(size=(22, 4)).astype("float32")


def pairs(**options: Any) -> sg.MirroredStrategy:
    return sg.MirroredStrategy(PAIRS, **options)


def made(strategy: sg.Strategy, optimizer: Any = "adam", **options: Any) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(8, activation="tanh"),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.3, seed=5),
                keras.layers.Dense(4, kernel_regularizer="l2"),
            ]
        )
        model.compile(optimizer=optimizer, loss="mse", metrics=["mae"], **options)
    return model


def pieces_of(variable: Any) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in variable.storage.addressable_shards}


# --- what a replica function says


@pytest.mark.parametrize(
    "groups", [pytest.param(PAIRS, marks=pytest.mark.compatibility), FOURS, [["cpu:1", "cpu:2"]]]
)
def test_value_is_the_same_wherever_it_is_put(groups) -> None:
    strategy = sg.MirroredStrategy(groups)
    count = strategy.topology.num_logical_devices

    def step():
        own = sg.get_replica_context().replica_id_in_sync_group
        value = jnp.arange(32.0).reshape(4, 8) * (jnp.float32(own) + 1)
        split = strategy.split_to_logical_devices(value, [1, count])
        whole = strategy.replicate_to_logical_devices(jnp.tanh(split))
        with pytest.warns(UserWarning, match="puts a copy on every device of the replica"):
            there = strategy.assign_to_logical_device(whole, count - 1)
        return there @ there.T

    base = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    for index, part in enumerate(strategy.local_results(strategy.run(step))):
        value = np.tanh(base * (index + 1))
        np.testing.assert_allclose(part, value @ value.T, rtol=1e-5)


def test_compiled_step_computes_with_the_pieces() -> None:
    """The program of a device has the shape of the piece, and not that of the value."""
    strategy = sg.MirroredStrategy(FOURS)

    def step(x):
        return jnp.cos(strategy.split_to_logical_devices(x, [2, 2]))

    x = jnp.arange(32.0).reshape(4, 8)
    np.testing.assert_allclose(strategy.run(step, (x,)).components[1], np.cos(x), rtol=1e-6)
    (program,) = strategy.executor._programs.values()
    text = program.step.compiled(many=False).lower([], [], [], [x], [], []).compile().as_text()
    assert "f32[2,4]" in next(line for line in text.splitlines() if "cosine" in line)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
@pytest.mark.parametrize("run_eagerly", [False, True])
def test_one_device_a_replica_returns_the_value(devices, run_eagerly) -> None:
    strategy = sg.MirroredStrategy(devices)
    sg.config.run_eagerly(run_eagerly)

    def step():
        value = jnp.ones((2, 3))
        assert strategy.assign_to_logical_device(value, 0) is value
        assert strategy.split_to_logical_devices(value, [1, 1]) is value
        assert strategy.replicate_to_logical_devices(value) is value
        return value

    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)


@pytest.mark.parametrize("devices", [["cpu:0", "cpu:1"], PAIRS])
@pytest.mark.parametrize(
    ("method", "argument", "match"),
    [
        ("assign_to_logical_device", 2, "logical_device_id=2 in a replica of"),
        ("assign_to_logical_device", -1, "logical_device_id=-1 in a replica of"),
        ("split_to_logical_devices", [2], r"partition_dimensions=\[2\] for a value of shape"),
        ("split_to_logical_devices", [4, 1], r"partition_dimensions=\[4, 1\] for a value"),
        ("split_to_logical_devices", [-1, -2], r"partition_dimensions=\[-1, -2\] for a value"),
    ],
)
def test_place_that_is_not_there_is_refused(devices, method, argument, match) -> None:
    strategy = sg.MirroredStrategy(devices)
    with pytest.raises(ValueError, match=match):
        strategy.run(lambda: getattr(strategy, method)(jnp.ones((4, 3)), argument))


def test_axis_that_does_not_divide_is_refused() -> None:
    strategy = pairs()
    with pytest.raises(ValueError, match="divides axis 1 of a value of shape"):
        strategy.run(lambda: strategy.split_to_logical_devices(jnp.ones((4, 3)), [1, 2]))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("assign_to_logical_device", (0,)),
        ("split_to_logical_devices", ([2],)),
        ("replicate_to_logical_devices", ()),
    ],
)
def test_cross_replica_context_is_refused(method, arguments) -> None:
    strategy = pairs()
    with strategy.scope(), pytest.raises(RuntimeError, match=f"strategy.{method} was called in"):
        getattr(strategy, method)(jnp.ones(2), *arguments)


def test_layer_that_splits_is_built_without_a_batch_size() -> None:
    strategy = pairs()

    class Split(keras.layers.Layer):
        def call(self, x):
            return strategy.split_to_logical_devices(x, [2, 1])

    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), Split(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    assert model.output_shape == (None, 1)
    weights = [weight.numpy() for weight in model.weights]
    predicted = model.predict(X[:8], batch_size=8, verbose=0)
    np.testing.assert_allclose(predicted, X[:8] @ weights[0] + weights[1], rtol=1e-4, atol=1e-5)


# --- variables


def test_variable_with_a_layout_is_stored_in_pieces() -> None:
    strategy = pairs(layout_map={"weight": (None, "logical")})
    with strategy.scope():
        weight = sg.Variable(np.arange(8.0).reshape(2, 4), name="weight", dtype="float32")
        other = sg.Variable(np.ones((2, 4)), name="other", dtype="float32")
    assert pieces_of(weight) == {(2, 2)}
    assert pieces_of(other) == {(2, 4)}
    np.testing.assert_array_equal(weight.value, np.arange(8.0).reshape(2, 4))
    assert weight.value.devices() == {jax.devices("cpu")[0]}
    weight.assign(np.ones((2, 4)))
    assert pieces_of(weight) == {(2, 2)}
    weight.assign_add(other.value)
    np.testing.assert_array_equal(weight.numpy(), np.full((2, 4), 2.0))
    assert pieces_of(weight) == {(2, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "muon"])
def test_step_keeps_pieces_and_divides_what_the_optimizer_keeps(optimizer) -> None:
    strategy = pairs(layout_map=LAYOUTS)
    model = made(strategy, optimizer)
    model.fit(X, Y, batch_size=8, verbose=0)
    for layer in (model.layers[0], model.layers[-1]):
        rows, columns = layer.kernel.shape
        assert pieces_of(layer.kernel) == {(rows, columns // 2)}
        assert pieces_of(layer.bias) == {(columns // 2,)}
        slots = [s for s in model.optimizer.variables if tuple(s.shape) == (rows, columns)]
        assert all(pieces_of(slot) == {(rows, columns // 2)} for slot in slots)
        assert optimizer != "adam" or len(slots) == 2


def test_replicas_exchange_gradients_of_pieces() -> None:
    strategy = pairs(layout_map={"w": (None, "logical")})
    with strategy.scope():
        w = sg.Variable(np.ones((6, 4)), name="w", dtype="float32", aggregation="sum")

    def step(x):
        _, (gradient,) = sg.value_and_grad(lambda: jnp.sum(jnp.tanh(x @ w.value)), [w])
        w.assign_add(gradient)

    arguments = flatten_arguments((jnp.ones((3, 6)),), {}, num_replicas=2)
    lowered = strategy.executor.lower(step, arguments, strategy.topology)
    lines = [line for line in lowered.compile().as_text().splitlines() if " all-reduce(" in line]
    assert len(lines) == 1
    assert "f32[6,2]" in lines[0]


def test_deep_copy_divides_as_the_original_does() -> None:
    strategy = copy.deepcopy(pairs(layout_map={"w": ("logical",)}))
    with strategy.scope():
        w = sg.Variable(np.ones(4), name="w", dtype="float32")
    assert pieces_of(w) == {(2,)}


@pytest.mark.slow
def test_rule_that_matches_no_variable_is_reported_when_training_starts() -> None:
    model = made(pairs(layout_map={".*/kernel": (None, "logical"), "kernels": ("logical",)}))
    model.predict(X[:4], verbose=0)
    with pytest.raises(ValueError, match=r"patterns \['kernels'\] of layout_map match no variable"):
        model.fit(X, Y, verbose=0)
    model.run_eagerly = True
    with pytest.raises(ValueError, match=r"patterns \['kernels'\] of layout_map match no variable"):
        model.fit(X, Y, verbose=0)


def test_variable_that_became_the_strategy_s_is_divided() -> None:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8)])
    before = model.layers[0].kernel.numpy()
    sg.compile(model, distribute=pairs(layout_map=LAYOUTS), optimizer="sgd", loss="mse")
    assert pieces_of(model.layers[0].kernel) == {(6, 4)}
    np.testing.assert_array_equal(model.layers[0].kernel.numpy(), before)


# --- numbers


@pytest.mark.parametrize("as_function", [False, True])
def test_loop_of_ones_own_keeps_pieces(as_function) -> None:
    strategy = pairs(layout_map={"w": ("logical", None)})
    with strategy.scope():
        w = sg.Variable(np.ones((6, 4)), name="w", dtype="float32")
        optimizer = keras.optimizers.SGD(0.1)

    def step(batch):
        x, y = batch

        def loss_fn():
            return sg.compute_average_loss(jnp.mean((x @ w.value - y) ** 2, axis=-1))

        loss, grads = sg.value_and_grad(loss_fn, [w])
        optimizer.apply_gradients(zip(grads, [w], strict=True))
        return loss

    def whole_step(batch):
        return strategy.reduce("sum", strategy.run(step, args=(batch,)), axis=None)

    called = sg.function(whole_step) if as_function else whole_step
    wanted = np.ones((6, 4), np.float32)
    for index, batch in enumerate(
        strategy.distribute_dataset(sg.input.Dataset((X, Y), batch_size=8))
    ):
        rows, targets = X[8 * index : 8 * index + 8], Y[8 * index : 8 * index + 8]
        errors = rows @ wanted - targets
        np.testing.assert_allclose(called(batch), np.mean(errors**2), rtol=1e-5)
        wanted = wanted - 0.1 * 2 * rows.T @ errors / errors.size
        np.testing.assert_allclose(w.numpy(), wanted, rtol=1e-4, atol=1e-5)
        assert pieces_of(w) == {(3, 4)}
