"""What a Keras variable becomes in a strategy's scope, and how it is read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.registry import VariableKind
from tests.contract.parts import contribution
from tests.marks import slow
from tests.parity.comparison import (
    Scope,
    assert_like_plain_keras,
    fitted,
    mirrored,
    regression,
    small_regressor,
    state_of,
)
from tests.unit.keras.replicas import components_of, copies_of, kind_of

PLAIN, MIRRORED, ON_READ = VariableKind.PLAIN, VariableKind.MIRRORED, VariableKind.ON_READ


def _dense_kernel() -> Any:
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    return layer.kernel


def _moving_mean() -> Any:
    layer = keras.layers.BatchNormalization()
    layer.build((None, 3))
    return layer.moving_mean


def _momentum() -> Any:
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build([_dense_kernel()])
    return optimizer.variables[-1]


# What makes the variable, its kind under several replicas, its aggregation there.
_VARIABLES: dict[str, tuple[Callable[[], Any], VariableKind, str]] = {
    "layer": (_dense_kernel, MIRRORED, "none"),
    "moving_mean": (_moving_mean, ON_READ, "mean"),
    "metric": (lambda: keras.metrics.Mean().total, ON_READ, "sum"),
    "integer_metric": (lambda: _Hits().hits, ON_READ, "sum"),
    "iterations": (lambda: keras.optimizers.SGD().iterations, MIRRORED, "only_first_replica"),
    "momentum": (_momentum, MIRRORED, "none"),
    "seed": (lambda: keras.random.SeedGenerator(3).state, MIRRORED, "none"),
    "keras_variable": (lambda: keras.Variable(1.0), MIRRORED, "none"),
    "on_write": (lambda: sg.Variable(1.0, synchronization="on_write"), MIRRORED, "none"),
    "on_read": (
        lambda: sg.Variable(
            1.0,
            synchronization=sg.VariableSynchronization.ON_READ,
            aggregation=sg.VariableAggregation.MEAN,
        ),
        ON_READ,
        "mean",
    ),
}


class _Hits(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="hits")
        self.hits = self.add_variable((), "zeros", dtype="int32", name="hits")


@pytest.mark.compatibility
@pytest.mark.parametrize("name", _VARIABLES)
def test_kind_of_variable_under_several_replicas_one_and_none(name: str) -> None:
    make, kind, aggregation = _VARIABLES[name]
    strategy = mirrored(2)
    with strategy.scope():
        variable = make()
    assert (kind_of(variable), variable.aggregation) == (kind, aggregation)
    assert variable.distribute_strategy is strategy
    copy_shape = (1, *variable.shape) if kind is ON_READ else tuple(variable.shape)
    assert [copy.shape for copy in copies_of(variable)] == [copy_shape] * 2
    with sg.OneDeviceStrategy("cpu:1").scope():
        on_one_device = make()
    assert kind_of(on_one_device) is PLAIN
    assert [device.id for device in on_one_device.storage.devices()] == [1]
    outside = make()
    assert kind_of(outside) is None
    assert type(outside) is keras.Variable


@pytest.mark.compatibility
def test_variable_takes_the_arguments_of_tensorflow_in_its_order() -> None:
    with mirrored(2).scope():
        variable = sg.Variable(lambda: [1.0, 2.0], False, "weights", "float16", "on_write", "sum")
    assert (variable.trainable, variable.name, variable.dtype) == (False, "weights", "float16")
    assert (variable.synchronization, variable.aggregation) == ("on_write", "sum")
    np.testing.assert_array_equal(np.asarray(variable), [1.0, 2.0])


def test_variable_that_could_not_be_made_leaves_nothing_behind() -> None:
    strategy = mirrored(2)
    with strategy.scope(), pytest.raises(ValueError, match="must be a string") as caught:
        keras.Variable(1.0, name="not/allowed")
    # `caught` keeps the half-made object alive, as a notebook does with the last error.
    assert "not/allowed" in str(caught.value)
    assert strategy.variables.uninitialized() == []


# Models that are filled in a scope and built, compiled and trained outside of it.

_X = np.ones((6, 3), "float32")
_Y = np.ones((6, 2), "float32")


class _Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x)


@pytest.mark.parametrize("kind", ["made inside", "filled inside", "subclassed"])
def test_model_belongs_to_the_scope_that_it_was_filled_in(kind) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    layers = keras.layers
    model: Any = keras.Sequential()
    with strategy.scope():
        if kind == "made inside":
            model = keras.Sequential()
        for layer in (layers.Dense(4), layers.Dropout(0.2), layers.Dense(2)):
            model.add(layer)
        model = _Subclassed() if kind == "subclassed" else model
    if kind == "made inside":
        model.build((None, 3))
    if kind == "subclassed":
        model(_X)
    model.compile("rmsprop", "mse", metrics=["mae"])
    model.fit(_X, _Y, batch_size=4, verbose=0)
    assert model.distribute_strategy is strategy
    for variable in [*model.variables, *model.optimizer.variables]:
        assert strategy.extended.variable_created_in_scope(variable)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`")
@pytest.mark.parametrize("change", ["LoRA", slow("model"), slow("without bias")])
def test_weights_that_a_layer_adds_later_belong_to_its_strategy(change) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        x, y = regression()
        with scope():
            model = small_regressor(use_bias=change != "without bias")
            model.compile(optimizer="sgd", loss="mse")
        model.fit(x, y, batch_size=5, shuffle=False, verbose=0)
        if change == "LoRA":
            model.layers[0].enable_lora(2, a_initializer="ones", b_initializer="ones")
        else:
            (model if change == "model" else model.layers[0]).quantize("int8")
        predictions = model.predict(x, batch_size=5, verbose=0)
        result = {"predictions": predictions} | state_of(model)
        if change != "LoRA":
            return result
        model.compile(optimizer="sgd", loss="mse")
        return result | fitted(model, x, y)

    assert_like_plain_keras(job, replicas=(3,))


@pytest.mark.parametrize("name", ["Adam", "LossScaleOptimizer"])
def test_optimizer_belongs_to_the_strategy_of_the_variables_it_is_built_for(name) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = small_regressor()
    optimizer = keras.optimizers.Adam()
    if name == "LossScaleOptimizer":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    for variable in optimizer.variables:
        assert strategy.extended.variable_created_in_scope(variable)


# What may be assigned to a variable: other kinds of values, other dtypes, and in steps that fail.


def test_value_is_cast_to_the_dtype_of_the_variable(execution: str) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        half = sg.Variable(1.0, dtype="bfloat16", aggregation="mean")
        own = sg.Variable(0, synchronization="on_read", aggregation="sum")
        total = sg.Variable([10.0, 10.0], aggregation="sum")
    components = components_of(own)
    assert components == [0, 0]  # each starts with the whole value
    outside: Any = keras.Variable(10.0, name="outside")
    with pytest.raises(ValueError, match="outside"):  # of no strategy
        strategy.run(lambda: outside.assign(contribution()))
    assert float(outside.value) == 10.0

    def step() -> None:
        half.assign(contribution())
        own.assign(contribution())
        total.assign_add(jnp.full(2, contribution()))

    strategy.run(step)
    assert (half.dtype, float(half.value)) == ("bfloat16", 1.5)
    assert (own.dtype, components_of(own)) == ("int32", [1, 2])
    assert [copy.tolist() for copy in copies_of(total)] == [[13.0, 13.0]] * 2


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]], ids=len)
def test_initial_and_assigned_arrays_are_not_shared(devices) -> None:
    """A step donates the buffers of the variables that it writes."""
    strategy = sg.MirroredStrategy(devices)
    given = jnp.array([5.0, 6.0])
    with strategy.scope():
        online, target = sg.Variable(given), sg.Variable([0.0, 0.0])
        second, third = sg.Variable(online), sg.Variable(online.value)

    def train_all() -> None:
        for one in (online, second, third):
            one.assign_add([1.0, 1.0])

    for _ in range(2):
        strategy.run(train_all)
    for one in (online, second, third):
        np.testing.assert_array_equal(one.value - 2, given)

    def train() -> None:
        online.assign_add([1.0, 1.0])

    def train_both() -> None:
        online.assign_add([1.0, 1.0])
        target.assign_add([10.0, 10.0])

    online.assign(given)
    strategy.run(train)
    np.testing.assert_array_equal(given, [5.0, 6.0])
    for value_of in (lambda: online, lambda: online.value):
        target.assign(value_of())
        strategy.run(train)
        np.testing.assert_array_equal(target.value + 1, online.value)
        target.assign(value_of())
        strategy.run(train_both)
        np.testing.assert_array_equal(target.value - 9, online.value)


# Hand-written steps of pure JAX in a strategy's scope: the numbers of plain Keras.

_ROWS = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
_TOTALS = _ROWS.sum(1, keepdims=True)


def _multi_optimizer() -> Any:
    by_path = {".*kernel": keras.optimizers.Adam(0.05)}
    sgd = keras.optimizers.SGD(0.1, momentum=0.9)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, by_path))


def _loss_scale() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0)


def _values(variables: Any) -> list[Any]:
    return [variable.value for variable in variables]


def _trained(make_optimizer: Callable[[], Any], transform: Callable[..., Any]) -> list[Any]:
    """The state after three steps in the manner of Keras's guide for JAX."""
    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.BatchNormalization()])
    model.add(layers.Dropout(0.3, seed=1))
    model.add(layers.Dense(1))
    optimizer = make_optimizer()
    optimizer.build(model.trainable_variables)
    error, mean = keras.metrics.MeanSquaredError(), keras.metrics.Mean()

    def loss(trainable: Any, others: Any) -> Any:
        predicted, others = model.stateless_call(trainable, others, _ROWS, training=True)
        return jnp.mean(jnp.square(predicted - _TOTALS)), (others, predicted)

    def step(state: Any) -> Any:
        trainable, others, slots, of_error, of_mean = state
        (value, (others, predicted)), grads = jax.value_and_grad(loss, has_aux=True)(
            trainable, others
        )
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        of_error = error.stateless_update_state(of_error, _TOTALS, predicted)
        return trainable, others, slots, of_error, mean.stateless_update_state(of_mean, value)

    of_model = _values(model.trainable_variables), _values(model.non_trainable_variables)
    state = (*of_model, *map(_values, (optimizer.variables, error.variables, mean.variables)))
    for _ in range(3):
        state = transform(step)(state)
    results = error.stateless_result(state[3]), mean.stateless_result(state[4])
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state, results))]


@pytest.mark.parametrize(
    ("make_optimizer", "transform", "make_strategy"),
    [
        (_multi_optimizer, jax.jit, sg.MirroredStrategy),
        slow(_multi_optimizer, lambda step: step, sg.MirroredStrategy),
        slow(_loss_scale, jax.jit, sg.MirroredStrategy),
        slow(_multi_optimizer, jax.jit, sg.CentralStorageStrategy),
    ],
)
def test_stateless_steps_in_a_scope_are_those_of_keras(
    make_optimizer, transform, make_strategy
) -> None:
    expected = _trained(make_optimizer, jax.jit)
    with make_strategy(["cpu:0", "cpu:1"]).scope():
        got = _trained(make_optimizer, transform)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_apply_in_a_stateless_scope_changes_nothing_outside() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        weight = keras.Variable(1.0)
        total = keras.Variable(1.0, trainable=False, synchronization="on_read", aggregation="sum")
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build([weight])

        def step(given: Any) -> Any:
            scope = keras.StatelessScope(state_mapping=[(weight, given), (total, 2 * given)])
            with scope:
                optimizer.apply([jnp.ones(())], [weight])
                total.assign_add(1.0)
                return weight.value, total.value, total + 1.0

        for call in (step, jax.jit(step)):
            np.testing.assert_allclose(call(jnp.float32(4.0)), [3.5, 9.0, 10.0])
    assert (float(weight.value), float(total.value), int(optimizer.iterations.value)) == (1, 2, 0)


def test_variable_with_a_value_in_a_stateless_scope_is_refused_as_by_keras() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), keras.StatelessScope():
        with pytest.raises(ValueError, match="create a variable while in a stateless scope"):
            keras.Variable(initializer=0)
        with pytest.raises(ValueError, match="create a variable while in a stateless scope"):
            keras.Variable(np.zeros(2, "float32"))
    made: list[Any] = []  # in a step a value may be given

    def step() -> Any:
        made.extend([] if made else [keras.Variable(initializer=0)])
        return made[0]

    with strategy.scope():
        assert [int(part) for part in strategy.run(step).components] == [0, 0]
