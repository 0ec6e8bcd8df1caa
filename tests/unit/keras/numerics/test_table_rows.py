"""Rows of a table are updated alone where that comes to the same, and only there."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.jaxprs import without_unused
from stratagem.execution.programs.offloaded_step import OffloadedStep
from stratagem.keras.numerics import optimizer as table_rows
from stratagem.keras.numerics.layers import check_batch_size, max_of_windows
from tests.contract.parts import seldom_eager
from tests.marks import slow
from tests.parity.comparison import fitted, mirrored, plain_keras, regression, with_known_weights
from tests.unit.keras.replicas import copies_of, per_replica

TWO = ["cpu:0", "cpu:1"]
NUM_ROWS, WIDTH = 9000, 8
IDS = np.array([[[1, 5], [5, 8999]], [[2, 5], [-3, 1]]], "int32")


def _without_decay() -> keras.optimizers.Optimizer:
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    return optimizer


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.5), True),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.5), True),
    "schedule": (
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
        True,
    ),
    "clipped": (lambda: keras.optimizers.Adagrad(0.5, global_clipnorm=0.1), True),
    "scaled": (lambda: keras.optimizers.SGD(0.5, loss_scale_factor=4.0), True),
    "momentum": (lambda: keras.optimizers.SGD(0.5, momentum=0.9), False),
    "decay": (lambda: keras.optimizers.SGD(0.5, weight_decay=0.1), False),
    "average": (lambda: keras.optimizers.SGD(0.5, use_ema=True), False),
    "accumulated": (lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), False),
    "adam": (lambda: keras.optimizers.Adam(0.5), False),
    "adafactor": (lambda: keras.optimizers.Adafactor(0.5), False),
    "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)), False),
    "no decay of tables": (_without_decay, True),
}


_QUICK = ("adagrad", "adam", "no decay of tables")


def trained(strategy: sg.Strategy, make: Any, constraint: Any = None) -> tuple[Any, list[Any]]:
    with strategy.scope():
        initializer = keras.initializers.RandomUniform(seed=1)
        table = keras.layers.Embedding(
            NUM_ROWS, WIDTH, initializer, embeddings_constraint=constraint
        )
        table.build()
        optimizer = make()
        optimizer.build(table.trainable_variables)

    def step(ids: Any) -> Any:
        def loss() -> Any:
            value = keras.ops.sum(table(ids) ** 2 + table(ids[:1] + 1))
            return optimizer.scale_loss(value)

        value, grads = sg.value_and_grad(loss, table.trainable_variables)
        optimizer.apply_gradients(zip(grads, table.trainable_variables, strict=True))
        return value

    count = strategy.num_replicas_in_sync
    parts = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(
            np.concatenate(IDS) if count == 1 else IDS[context.replica_id_in_sync_group]
        )
    )
    for _ in range(3):
        strategy.run(step, args=(parts,))
    return table, list(strategy.executor.programs)


def whole_tables_made(jaxpr: Any) -> int:
    """How many operations make an array of the size of the table, other than by changing rows."""
    jaxpr, _ = without_unused(jaxpr, [True] * len(jaxpr.invars))
    return sum(
        variable.aval.shape == (NUM_ROWS, WIDTH)
        and eqn.primitive.name != "scatter"
        and eqn.params.get("name") != "_stratagem_with_updated_rows"
        for eqn in jaxpr.eqns
        for variable in eqn.outvars
    )


@pytest.mark.parametrize(
    "name",
    [*_QUICK, *(slow(name) for name in [*OPTIMIZERS, "sgd, constrained"] if name not in _QUICK)],
)
def test_numbers_are_those_of_whole_updates(name, monkeypatch) -> None:
    make, takes_rows = OPTIMIZERS[name.partition(",")[0]]
    constraint, takes_rows = ("unit_norm", False) if "," in name else (None, takes_rows)
    central, (program,) = trained(sg.CentralStorageStrategy(TWO, "cpu:2"), make, constraint)
    mirrored, (of_copies,) = trained(sg.MirroredStrategy(TWO), make, constraint)
    assert (whole_tables_made(of_copies.trace.jaxpr.jaxpr) == 0) == takes_rows
    monkeypatch.setattr(table_rows, "_may_take_rows", lambda *_: False)
    whole, _ = trained(sg.MirroredStrategy(TWO), make, constraint)
    for table in (central, mirrored):
        np.testing.assert_allclose(
            table.embeddings.value, whole.embeddings.value, rtol=1e-5, atol=1e-6
        )
    assert isinstance(program.step, OffloadedStep)
    (update,) = program.step.updates
    assert (whole_tables_made(update.jaxpr) == 0) == takes_rows


def test_replicas_see_no_table() -> None:
    _, (program,) = trained(sg.CentralStorageStrategy(TWO, "cpu:2"), OPTIMIZERS["adagrad"][0])
    assert [variable.path for variable in program.trace.read_only] == []
    shapes = {
        variable.aval.shape
        for eqn in program.trace.jaxpr.jaxpr.eqns
        for variable in (*eqn.invars, *eqn.outvars)
    }
    assert (NUM_ROWS, WIDTH) not in shapes
    assert {
        device.id
        for array in jax.live_arrays()
        if array.shape == (NUM_ROWS, WIDTH)
        for device in array.devices()
    } >= {2}


# Random numbers in replicas: others on each, on the first those of one device, repeatable.

_ONES = np.ones((4, 8), "float32")


def _dropped(strategy: Any, layer: Any, num_steps: int = 1) -> list[list[np.ndarray]]:
    """What dropout leaves of ones on each replica, step by step."""
    parts = per_replica(strategy, [_ONES] * strategy.num_replicas_in_sync)

    def step(rows: Any) -> Any:
        return layer(rows, training=True)

    return [
        [np.asarray(part) for part in strategy.local_results(strategy.run(step, args=(parts,)))]
        for _ in range(num_steps)
    ]


def _dropout(strategy: Any) -> Any:
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=11)
        layer.build(_ONES.shape)
    return layer


@seldom_eager
def test_first_replica_drops_what_one_device_drops(execution: str) -> None:
    """Other replicas and steps drop others; the state of the seed is the same on all."""
    strategy = mirrored(3)
    layer = _dropout(strategy)
    before = copies_of(layer.seed_generator.state)[0]
    steps = _dropped(strategy, layer, num_steps=2)
    alone = keras.layers.Dropout(0.5, seed=11)
    for parts in steps:
        np.testing.assert_array_equal(parts[0], np.asarray(alone(_ONES, training=True)))
    assert len({part.tobytes() for parts in steps for part in parts}) == 6
    assert {value for parts in steps for part in parts for value in part.flat} == {0.0, 2.0}
    first, *others = copies_of(layer.seed_generator.state)
    np.testing.assert_array_equal(others, [first] * 2)
    assert (first != before).any()


@pytest.mark.slow
def test_one_seed_gives_one_run_however_many_steps_a_call() -> None:
    def job(steps_per_execution: int) -> dict[str, Any]:
        x, y = regression()
        with mirrored(2).scope():
            noise = [keras.layers.Dropout(0.5), keras.layers.GaussianNoise(0.3)]
            layers = [keras.layers.Dense(8), *noise, keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((3,)), *layers])
            model.compile(optimizer="sgd", loss="mse", steps_per_execution=steps_per_execution)
        return fitted(model, x, y, batch_size=2)

    one, three = (plain_keras(lambda _, steps=steps: job(steps)) for steps in (1, 3))
    for key, value in one.items():
        np.testing.assert_allclose(three[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def test_seed_generator_of_ones_own_draws_differently_on_each_replica() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        generator = keras.random.SeedGenerator(5)
    drawn = strategy.run(lambda: keras.random.normal((3,), seed=generator))
    parts = [np.asarray(part) for part in strategy.local_results(drawn)]
    alone = np.asarray(keras.random.normal((3,), seed=keras.random.SeedGenerator(5)))
    np.testing.assert_array_equal(parts[0], alone)
    assert (parts[0] != parts[1]).any()


def test_random_numbers_without_a_seed_work_under_one_strategy_after_another() -> None:
    # Keras keeps one generator for the program, made by whoever draws first.
    keras.backend.clear_session(free_memory=False)
    drawn = []
    for scope in (mirrored(2).scope, mirrored(3).scope, contextlib.nullcontext):
        with scope():
            drawn.append(np.asarray(keras.random.normal((3,))).tobytes())
    assert len(set(drawn)) == 3
    keras.backend.clear_session(free_memory=False)


def test_random_numbers_without_a_seed_are_refused_in_a_compiled_step() -> None:
    with pytest.raises(ValueError, match="should only use seeded random ops"):
        mirrored(2).run(lambda: keras.random.normal((3,)))


# Max pooling on CPU: values and derivatives are those of XLA's own, ties included.

_SHAPES_AND_WINDOWS = [
    ((3, 9, 3), (2,)),
    slow((1, 30, 2), (15,)),
    slow((2, 7, 9, 3), (2, 3)),
    slow((2, 6, 5, 4, 2), (2, 2, 2)),
    slow((1, 12, 12, 1), (12, 12)),  # more places than a byte counts
]


def _reference(inputs: Any, window: tuple[int, ...]) -> Any:
    extents = (1, *window, 1)
    return jax.lax.reduce_window(inputs, -jnp.inf, jax.lax.max, extents, extents, "VALID")


def _with_ties(shape: tuple[int, ...]) -> Any:
    return jnp.asarray(np.random.default_rng(0).integers(-2, 3, shape), "float32")


@pytest.mark.parametrize(("shape", "window"), _SHAPES_AND_WINDOWS)
def test_values_and_gradients_are_those_of_xla(shape, window) -> None:
    inputs = _with_ties(shape)
    expected, expected_gradient = jax.vjp(lambda x: _reference(x, window), inputs)
    values, gradient = jax.vjp(lambda x: max_of_windows(x, window), inputs)
    np.testing.assert_array_equal(values, expected)
    incoming = jnp.arange(1.0, expected.size + 1).reshape(expected.shape)
    np.testing.assert_array_equal(gradient(incoming)[0], expected_gradient(incoming)[0])


@pytest.mark.slow
def test_forward_and_second_derivatives_exist() -> None:
    inputs, tangent = _with_ties((2, 4, 4, 1)), jnp.arange(32.0).reshape(2, 4, 4, 1)
    _, expected = jax.jvp(lambda x: _reference(x, (2, 2)), (inputs,), (tangent,))
    _, computed = jax.jvp(lambda x: max_of_windows(x, (2, 2)), (inputs,), (tangent,))
    np.testing.assert_array_equal(computed, expected)

    def cubes(values: Any) -> Any:
        return jnp.sum(max_of_windows(values.reshape(1, 4, 1), (2,)) ** 3)

    np.testing.assert_array_equal(jax.hessian(cubes)(jnp.arange(4.0)), np.diag([0, 6, 0, 18]))


def _primitives(layer: Any, shape: tuple[int, ...]) -> str:
    """The program of a layer's gradient in a replica, as text."""
    found: list[str] = []
    strategy = mirrored(2)
    inputs = jnp.ones(shape)

    def step() -> Any:
        loss = lambda x: jnp.sum(layer(x))  # noqa: E731
        found.append(str(jax.make_jaxpr(jax.grad(loss))(inputs)))

    strategy.run(step)
    return found[0]


@pytest.mark.parametrize(
    ("layer", "shape", "is_fast"),
    [
        (keras.layers.MaxPooling1D(2), (2, 6, 1), True),
        (keras.layers.MaxPooling2D(2), (1, 5, 4, 1), True),
        (keras.layers.MaxPooling3D(2), (1, 4, 4, 4, 1), True),
        (keras.layers.MaxPooling2D(2, padding="same"), (1, 4, 4, 1), True),
        (keras.layers.MaxPooling2D(2, padding="same"), (1, 5, 4, 1), False),
        (keras.layers.MaxPooling2D(3, strides=2), (1, 5, 5, 1), False),
        (keras.layers.MaxPooling2D(2, data_format="channels_first"), (1, 1, 4, 4), False),
        (keras.layers.AveragePooling2D(2), (1, 4, 4, 1), None),
    ],
)
def test_layers_whose_windows_lie_side_by_side_are_fast(layer, shape, is_fast) -> None:
    program = _primitives(layer, shape)
    assert ("select_and_scatter" in program) is (is_fast is False)
    plain = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(layer(x))))(jnp.ones(shape))
    assert ("select_and_scatter" in str(plain)) is (is_fast is not None)  # Keras's own


# Stateful RNNs under a strategy keep the state of the global batch from one batch to the next.

_X = np.random.RandomState(0).standard_normal((10, 3, 2)).astype("float32")
_Y = np.ones((10, 2), "float32")
_RATE = 0.1


def _stateful(make: Any, *, run_eagerly: bool) -> Any:
    layers = [keras.Input(batch_shape=(5, 3, 2)), make(2, stateful=True)]
    model = with_known_weights(keras.Sequential(layers))
    model.compile(optimizer=keras.optimizers.SGD(_RATE), loss="mse", run_eagerly=run_eagerly)
    return model


def _by_hand(make: Any) -> tuple[list[float], list[Any], list[Any]]:
    """The losses of an epoch of two batches, the weights and the states after it."""
    layer = make(2, return_state=True)
    layer.build((5, 3, 2))
    with_known_weights(layer)
    weights = [variable.value for variable in layer.trainable_variables]
    rest = [variable.value for variable in layer.non_trainable_variables]
    states = [np.zeros((5, 2), "float32")] * (2 if make is keras.layers.LSTM else 1)

    def loss_of(weights: Any, states: Any, x: Any, y: Any) -> Any:
        (outputs, *new), _ = layer.stateless_call(weights, rest, x, initial_state=states)
        return keras.ops.mean((outputs - y) ** 2), new

    losses = []
    for x, y in zip(np.split(_X, 2), np.split(_Y, 2), strict=True):
        (loss, states), grads = jax.value_and_grad(loss_of, has_aux=True)(weights, states, x, y)
        weights = [weight - _RATE * grad for weight, grad in zip(weights, grads, strict=True)]
        losses.append(float(loss))
    return losses, weights, states


@pytest.mark.parametrize(
    ("make", "num_replicas", "run_eagerly"),
    [
        (keras.layers.LSTM, 2, False),
        slow(keras.layers.GRU, 2, True),
        slow(keras.layers.GRU, 1, False),
    ],
)
def test_state_of_a_batch_goes_on_in_the_next(make, num_replicas, run_eagerly) -> None:
    losses, weights, states = _by_hand(make)
    with mirrored(num_replicas).scope():
        model = _stateful(make, run_eagerly=run_eagerly)
    history = model.fit(_X, _Y, batch_size=5, shuffle=False, verbose=0).history
    np.testing.assert_allclose(history["loss"], [np.mean(losses)], rtol=1e-5)
    for variable, value in zip(model.trainable_variables, weights, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=1e-5, atol=1e-6)
    for variable, value in zip(keras.tree.flatten(model.layers[0].states), states, strict=True):
        np.testing.assert_allclose(variable.value, value, rtol=1e-5, atol=1e-6)
    model.layers[0].reset_state()
    assert not np.any(keras.tree.flatten(model.layers[0].states)[0].value)


def test_batch_of_another_size_is_refused() -> None:
    with mirrored(2).scope():
        model = _stateful(keras.layers.LSTM, run_eagerly=False)
    strategy = model.distribute_strategy
    parts = strategy.distribute_values_from_function(lambda context: _X[:2])
    with pytest.raises(ValueError, match=r"'lstm.*' has state for 5 examples.*passed it 4 in 2"):
        strategy.run(model, args=(parts,))


def test_workers_with_batches_of_their_own_are_refused() -> None:
    model = _stateful(keras.layers.LSTM, run_eagerly=False)
    strategy = SimpleNamespace(placement=SimpleNamespace(is_remote=True))
    context = SimpleNamespace(strategy=strategy, global_num_examples=5, num_replicas_in_sync=1)
    words = r"(?s)cannot run the stateful RNN.*Fix: remove stateful=True"
    with pytest.raises(ValueError, match=words):
        check_batch_size(model.layers[0], _X[:5], context)


# The global random state is saved, and drawn from again.


def draw() -> list[Any]:
    return [
        random.random(),
        random.gauss(0.0, 1.0),  # keeps a second number for the next call
        np.random.random(),
        np.random.standard_normal(),
        np.random.permutation(9).tolist(),
        np.asarray(keras.random.uniform((2,))).tolist(),
    ]


@pytest.mark.parametrize("has_drawn", [False, True])
def test_what_was_drawn_is_drawn_again(has_drawn: bool, tmp_path: Path) -> None:
    keras.utils.set_random_seed(1)
    if has_drawn:
        draw()
    checkpoint = sg.train.Checkpoint(random=sg.train.RandomState())
    path = checkpoint.save(tmp_path / "ckpt")
    first, second = draw(), draw()
    assert first != second
    keras.utils.set_random_seed(2)
    assert draw() != first
    checkpoint.restore(path)
    assert [draw(), draw()] == [first, second]


@pytest.mark.parametrize("state", [{}, None, {"python": 1}])
def test_state_of_something_else_is_reported(state: Any) -> None:
    with pytest.raises(ValueError, match=r"RandomState.set_state received"):
        sg.train.RandomState().set_state(state)
