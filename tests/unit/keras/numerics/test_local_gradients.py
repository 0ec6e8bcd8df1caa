"""Islands: replicas that train in lockstep, and apart from others, against a simulation in JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.local_updates import DiLoCo, LocalSGD, StreamingDiLoCo
from stratagem.execution.tracing.functionalize import current_scope
from tests.marks import slow
from tests.unit.keras.numerics.islands import (
    BATCH,
    RATE,
    WEIGHTS,
    X,
    Y,
    fit,
    made,
    mean_square,
    strategy_of,
    trained,
)


def assert_same(model, expected, size, atol=3e-6):
    """Compares the global weights and each replica's own; copies of an island are equal in bits."""
    whole, own, _ = expected
    for place, variable in enumerate(model.trainable_variables):
        np.testing.assert_allclose(np.asarray(variable.value), whole[place], atol=atol)
        copies = np.asarray(variable.local_copy.storage)
        for island, state in enumerate(own):
            parts = copies[island * size : (island + 1) * size]
            np.testing.assert_array_equal(parts, np.stack([parts[0]] * size))
            np.testing.assert_allclose(parts[0], state[place], atol=atol)


@pytest.mark.parametrize(
    ("method", "count", "size", "steps"),
    [
        (LocalSGD(period=3), 3, 1, 1),
        slow(LocalSGD(period=1), 3, 1, 1),
        slow(LocalSGD(period=4, warmup_steps=5), 3, 1, 4),
        slow(DiLoCo(period=4), 3, 1, 4),
        slow(DiLoCo(period=3, outer_learning_rate=1.0, outer_momentum=0.5), 3, 1, 1),
        slow(LocalSGD(period=3), 4, 2, 1),
        slow(LocalSGD(period=3), 6, 2, 3),  # an island has no examples in the last batch
        slow(LocalSGD(period=5, warmup_steps=4), 6, 3, 1),
        slow(DiLoCo(period=4), 6, 2, 1),
    ],
    ids=str,
)
def test_fit_is_the_algorithm(method, count, size, steps) -> None:
    model = made(method, count, size, steps_per_execution=steps)
    start = model.get_weights()
    losses = fit(model)["loss"]
    expected = trained(start, method, count, size)
    assert_same(model, expected, size)
    np.testing.assert_allclose(losses, expected[2], rtol=1e-5)


@pytest.mark.slow
def test_eager_steps_agree() -> None:
    method = DiLoCo(period=2)
    model = made(method, 4, 2, run_eagerly=True)
    start = model.get_weights()
    fit(model, epochs=1, num=20)
    assert_same(model, trained(start, method, 4, 2, epochs=1, num=20), 2)


def weighted(state, x, y, weights):
    """The mean of a loss whose divisor is the sum of all weights of an island."""
    losses = ((x @ state[0] + state[1] - y) ** 2)[:, 0]
    return jnp.sum(losses * weights) / jnp.sum(weights)


def spread(y_true, y_pred):
    """A loss that compares examples with one another."""
    error = y_pred - y_true
    return keras.ops.mean((error - 0.5 * keras.ops.mean(error)) ** 2)


def spread_by_jax(state, x, y, weights):
    del weights
    error = x @ state[0] + state[1] - y
    return jnp.mean((error - 0.5 * jnp.mean(error)) ** 2)


def penalized(state, x, y, weights):
    return mean_square(state, x, y, weights) + 0.1 * jnp.sum(state[0] ** 2)


def penalized_layer():
    return [keras.layers.Dense(1, kernel_regularizer=keras.regularizers.L2(0.1))]


WEIGHTED = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "reference", "count", "size"),
    [
        ({"loss": WEIGHTED}, weighted, 6, 3),
        ({"loss": WEIGHTED}, weighted, 3, 1),
        ({"loss": spread}, spread_by_jax, 6, 2),
        ({"loss": spread}, spread_by_jax, 3, 1),
        ({"loss": spread, "run_eagerly": True}, spread_by_jax, 6, 2),
        ({"layers": penalized_layer}, penalized, 4, 2),
    ],
    ids=["weights", "weights alone", "pairs", "pairs alone", "pairs eagerly", "layers"],
)
def test_loss_is_that_of_the_examples_of_an_island(options, reference, count, size) -> None:
    method = LocalSGD(period=3)
    model = made(method, count, size, **options)
    start, num = model.get_weights(), 32 if reference is spread_by_jax else 92
    given = {"sample_weight": WEIGHTS[:num]} if reference is weighted else {}
    history = fit(model, num=num, **given)
    expected = trained(start, method, count, size, loss=reference, num=num)
    assert_same(model, expected, size)
    if reference is not spread_by_jax:
        np.testing.assert_allclose(history["loss"], expected[2], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("synchronized", [False, True])
def test_batch_statistics_are_those_of_an_island(synchronized) -> None:
    method = LocalSGD(period=3)
    norm = lambda: keras.layers.BatchNormalization(synchronized=synchronized)  # noqa: E731
    model = made(method, 4, 2, layers=lambda: [norm(), keras.layers.Dense(1)])
    start = [one.numpy() for one in model.trainable_variables]
    fit(model)

    def loss(state, x, y, weights):
        del weights
        gamma, beta, kernel, bias = state
        parts = x.reshape(1 if synchronized else 2, -1, 4)  # on one replica after the other
        mean, variance = parts.mean(1, keepdims=True), parts.var(1, keepdims=True)
        normal = ((parts - mean) / jnp.sqrt(variance + 1e-3)).reshape(-1, 4)
        return jnp.mean(((normal * gamma + beta) @ kernel + bias - y) ** 2)

    assert_same(model, trained(start, method, 4, 2, loss=loss), 2, atol=2e-5)


@pytest.mark.slow
def test_frozen_statistics_are_the_mean_of_an_island() -> None:
    layers = lambda: [keras.layers.BatchNormalization(), keras.layers.Dense(1)]  # noqa: E731
    still = keras.optimizers.SGD(0.0)
    model = made(LocalSGD(period=100), 4, 2, optimizer=still, layers=layers)
    fit(model, epochs=1)  # each replica has statistics of its own now
    norm, dense = model.layers
    both = (norm.moving_mean, norm.moving_variance)
    means, variances = (np.asarray(one.storage) for one in both)
    norm.trainable = False
    model.compile(keras.optimizers.SGD(0.0), "mse")
    loss = model.fit(X[:8], Y[:8], batch_size=8, shuffle=False, verbose=0).history["loss"]
    kernel, bias = (np.asarray(one.value) for one in dense.variables)
    squares = []
    for island in range(2):
        rows, mine = slice(4 * island, 4 * island + 4), slice(2 * island, 2 * island + 2)
        normal = (X[rows] - means[mine].mean(0)) / np.sqrt(variances[mine].mean(0) + 1e-3)
        squares.append((normal @ kernel + bias - Y[rows]) ** 2)
    np.testing.assert_allclose(loss, [np.mean(squares)], rtol=1e-5)


class OwnStep(keras.Model):
    """A model whose own training step averages over the examples of a replica."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data

        def loss():
            return keras.ops.mean((self(x, training=True) - y) ** 2)

        value, grads = sg.value_and_grad(loss, self.trainable_variables)
        self.optimizer.apply(grads, self.trainable_variables)
        return {"loss": value}


def test_own_train_step_is_averaged_by_examples() -> None:
    method = LocalSGD(period=3)
    keras.utils.set_random_seed(0)
    with strategy_of(method, 4, 2).scope():
        model = OwnStep()
        model.build((None, 4))
        model.compile(keras.optimizers.SGD(RATE))
    start = model.get_weights()
    fit(model, epochs=1, num=84)
    assert_same(model, trained(start, method, 4, 2, epochs=1, num=84), 2)


def test_own_loop_is_the_algorithm() -> None:
    method = LocalSGD(period=3)
    model = made(method, 6, 2)
    start = model.get_weights()
    strategy = model.weights[0].distribute_strategy
    loss = keras.losses.MeanSquaredError(reduction=None)

    def step(batch):
        x, y = batch

        def value():
            return sg.compute_average_loss(loss(y, model(x)))

        _, grads = sg.value_and_grad(value, model.trainable_variables)
        model.optimizer.apply(grads, model.trainable_variables)

    dataset = sg.input.Dataset((X, Y), batch_size=BATCH)
    for batch in strategy.distribute_dataset(dataset):
        strategy.run(step, args=(batch,))
    assert_same(model, trained(start, method, 6, 2, epochs=1), 2)


@pytest.mark.slow
def test_losses_of_outputs_are_of_the_examples_of_all_islands() -> None:
    keras.utils.set_random_seed(0)
    with strategy_of(LocalSGD(period=100), 6, 2).scope():
        inputs = keras.layers.Input((4,))
        model = keras.Model(inputs, {one: keras.layers.Dense(1, name=one)(inputs) for one in "ab"})
        model.compile(keras.optimizers.SGD(0.0), {"a": "mse", "b": "mae"})
    outputs = {one: model.get_layer(one) for one in "ab"}
    errors = {name: X @ one.kernel.numpy() + one.bias.numpy() - Y for name, one in outputs.items()}
    history = model.fit(X, {"a": Y, "b": Y}, batch_size=BATCH, verbose=0).history
    np.testing.assert_allclose(history["a_loss"], [np.mean(errors["a"] ** 2)], rtol=1e-5)
    np.testing.assert_allclose(history["b_loss"], [np.mean(np.abs(errors["b"]))], rtol=1e-5)


@pytest.mark.slow
def test_messages_between_islands_are_those_of_synchronizations(monkeypatch) -> None:
    """Outside of the branch that ends a period, sums are within islands."""
    sums: set[tuple[bool, str]] = set()
    names = {((0, 1), (2, 3)): "islands", ((0, 2), (1, 3)): "peers"}
    original = jax.lax.psum

    def psum(value, axis_name, *, axis_index_groups=None):
        scope = current_scope()
        if scope is not None:
            groups = tuple(map(tuple, axis_index_groups or ()))
            sums.add((scope.is_at_its_own_level, names.get(groups, "all")))
        return original(value, axis_name, axis_index_groups=axis_index_groups)

    monkeypatch.setattr(jax.lax, "psum", psum)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    norm = lambda: keras.layers.BatchNormalization(synchronized=True)  # noqa: E731
    layers = lambda: [norm(), keras.layers.Dense(1)]  # noqa: E731
    model = made(LocalSGD(period=4), 4, 2, loss=loss, layers=layers, metrics=["mae"])
    fit(model, epochs=1, sample_weight=WEIGHTS)
    assert sums == {(True, "islands"), (False, "peers")}


def test_rows_of_a_table_are_summed_over_an_island() -> None:
    strategy = strategy_of(LocalSGD(period=100), 4, 2)
    with strategy.scope():
        table = keras.Variable(np.zeros((70_000, 2), "float32"), name="table")
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([table])
    ids = sg.PerReplica(stacked=np.array([[1, 2], [2, 3], [4, 4], [5, 6]]))

    def step(own_ids):
        _, grads = sg.value_and_grad(lambda: jnp.sum(table.value[own_ids]), [table])
        optimizer.apply(grads, [table])

    strategy.run(step, args=(ids,))
    copies = np.asarray(table.local_copy.storage)[:, 1:7, 0]
    # The sum over an island, twice: a loop's gradients are parts of the sum over two islands.
    first, second = [-2, -4, -2, 0, 0, 0], [0, 0, 0, -4, -2, -2]
    np.testing.assert_array_equal(copies, [first, first, second, second])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (StreamingDiLoCo(period=4, fragments=2, overlap=1), 1),
        (StreamingDiLoCo(period=5, fragments=2, overlap=0, own_share=0.0), 3),
        (StreamingDiLoCo(period=6, fragments=2, overlap=3, own_share=0.25), 3),
    ],
    ids=str,
)
def test_streamed_fragments_agree_with_single_replicas(method, steps) -> None:
    """Islands of two train as replicas of their rows, one step at a time, do."""
    layers = lambda: [keras.layers.Dense(3), keras.layers.Dense(1)]  # noqa: E731
    islands = made(method, 4, 2, layers=layers, steps_per_execution=steps)
    single = made(method, 2, 1, layers=layers)
    for model in (islands, single):
        fit(model)
    for one, other in zip(islands.get_weights(), single.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


def test_one_island_trains_in_lockstep() -> None:
    model = made(DiLoCo(period=4), 4, 4)
    start = model.get_weights()
    fit(model)
    assert model.trainable_variables[0].local_copy is None
    whole, _, _ = trained(start, LocalSGD(period=1), 4, 4)
    for one, other in zip(model.get_weights(), whole, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(4, 2), (4, 1), (6, 2)])
def test_training_goes_on_from_a_file(count, size, tmp_path) -> None:
    """At the end of a period the file has all state, whatever islands go on from it."""
    method = DiLoCo(period=4)
    model = made(method, 4, 2)
    start = model.get_weights()
    fit(model, epochs=1)  # 8 steps
    model.save(tmp_path / "model.keras")
    with strategy_of(method, count, size).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])
    fit(loaded, epochs=1)
    assert int(loaded.optimizer.iterations) == 16
    if (count, size) == (4, 2):
        assert_same(loaded, trained(start, method, 4, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["int8", sg.compression.PowerSGD(rank=2)], ids=str)
def test_compressed_changes_are_equal_within_an_island(compression) -> None:
    def trained(given):
        keras.utils.set_random_seed(0)
        with strategy_of(LocalSGD(period=2, compression=given), 4, 2).scope():
            model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(512)])
            model.compile(keras.optimizers.SGD(RATE), "mse")
        model.fit(X, np.repeat(Y, 512, 1), batch_size=BATCH, shuffle=False, epochs=3, verbose=0)
        return model

    whole, short = trained(None), trained(compression)
    kernel, other = whole.get_weights()[0], short.get_weights()[0]
    assert np.any(kernel != other)
    np.testing.assert_allclose(other, kernel, atol=0.1 * np.abs(kernel).max())
    variable = short.trainable_variables[0]
    for parts in (variable.local_copy.storage, variable.outer_state["error"].storage):
        parts = np.asarray(parts)
        np.testing.assert_array_equal(parts[:2], np.stack([parts[0]] * 2))
        np.testing.assert_array_equal(parts[2:], np.stack([parts[2]] * 2))


def test_gradients_reduced_elsewhere_are_refused() -> None:
    model = made(LocalSGD(), 4, 2)

    def step():
        pairs = [(jnp.zeros(one.shape), one) for one in model.trainable_variables]
        sg.apply_gradients(model.optimizer, pairs, skip_gradients_aggregation=True)

    with pytest.raises(NotImplementedError, match="leave skip_gradients_aggregation out"):
        model.weights[0].distribute_strategy.run(step)
