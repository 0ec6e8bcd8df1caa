"""value_and_grad against jax.grad of the same function written without variables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.functionalize import ReplicaScope


@pytest.fixture
def model():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4, activation="tanh"), keras.layers.Dense(1)]
    )


def test_gradients_of_a_model_are_those_of_jax(model, tolerance) -> None:
    x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")

    def pure(weights):
        kernel, bias, last, shift = weights
        return jnp.mean((jnp.tanh(x @ kernel + bias) @ last + shift) ** 2)

    start = [jnp.asarray(variable.value) for variable in model.trainable_variables]
    expected_value, expected = jax.value_and_grad(pure)(start)
    value, gradients = sg.value_and_grad(
        lambda: keras.ops.mean(model(x) ** 2), model.trainable_variables
    )
    np.testing.assert_allclose(value, expected_value, **tolerance("float32"))
    assert len(gradients) == len(expected)
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, **tolerance("float32"))


def test_gradients_under_an_outer_jit_are_the_same(model) -> None:
    x = np.ones((2, 3), "float32")

    def loss():
        return keras.ops.sum(model(x))

    _, outside = sg.value_and_grad(loss, model.trainable_variables)
    _, inside = jax.jit(lambda: sg.value_and_grad(loss, model.trainable_variables))()
    for first, second in zip(outside, inside, strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6)


def test_no_variables_are_an_error_that_says_to_build_the_model() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        unbuilt = keras.Sequential([keras.layers.Dense(1)])

    def step():
        return sg.value_and_grad(lambda: jnp.sum(unbuilt(np.ones((2, 3)))), unbuilt.variables)

    for call in (step, lambda: strategy.run(step)):
        with pytest.raises(ValueError, match="build the model before reading"):
            call()
    with pytest.raises(ValueError, match=r"received \{\}, which holds no variables or arrays"):
        sg.value_and_grad(lambda: 2.0, {})


def test_function_that_returns_a_variable_has_its_gradient() -> None:
    variable = keras.Variable(3.0)
    value, (gradient,) = sg.value_and_grad(lambda: variable, [variable])
    assert (float(value), float(gradient)) == (3.0, 1.0)


def test_python_number_as_value_depends_on_nothing() -> None:
    value, gradients = sg.value_and_grad(lambda: 2.0, [keras.Variable(1.0)])
    assert float(value) == 2.0
    assert gradients == [None]


def test_the_same_variable_twice_has_the_same_gradient_twice() -> None:
    variable = keras.Variable(3.0)
    _, gradients = sg.value_and_grad(lambda: variable * variable, [variable, variable])
    assert [float(gradient) for gradient in gradients] == [6.0, 6.0]


def test_function_runs_once() -> None:
    calls = []
    variable = keras.Variable(3.0)
    sg.value_and_grad(lambda: (calls.append(1), variable * 2.0)[1], [variable])
    assert calls == [1]


def test_assignment_to_a_differentiated_variable_is_kept() -> None:
    variable = keras.Variable(3.0)

    def loss():
        value = variable * variable
        variable.assign(10.0)
        return value

    value, (gradient,) = sg.value_and_grad(loss, [variable])
    assert (float(value), float(gradient), float(variable.value)) == (9.0, 6.0, 10.0)


def test_failed_function_assigns_nothing() -> None:
    variable, counter = keras.Variable(3.0), keras.Variable(0.0)

    def loss():
        counter.assign_add(1.0)
        return variable * jnp.ones(2)

    with pytest.raises(ValueError, match=r"returned a value of shape \(2,\)"):
        sg.value_and_grad(loss, [variable])
    assert float(counter.value) == 0.0


def test_writes_and_doubts_reach_the_scope_around() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        weight, total = sg.Variable(3.0), sg.Variable(1.0, aggregation="sum")
    plain = keras.Variable(1.0)

    def loss():
        total.assign(jnp.float32(5.0))
        plain.assign(2.0)
        return weight * total

    scope = ReplicaScope(lambda variable: jnp.float32(4.0) if variable is weight else None)
    with scope:
        value, (gradient,) = sg.value_and_grad(loss, [weight])
        assert float(total.value) == 5.0
    assert (float(value), float(gradient)) == (20.0, 5.0)
    assert list(scope.writes.values()) == [total, plain]
    assert list(scope.unproven.values()) == [plain]
    assert float(plain.value) == 1.0


def test_stochastic_layer_moves_its_seed_once(model) -> None:
    dropout = keras.layers.Dropout(0.5, seed=1)
    kernel = keras.Variable(np.ones((8,), "float32"))
    before = np.asarray(dropout.seed_generator.state.value)
    _, (gradient,) = sg.value_and_grad(
        lambda: keras.ops.sum(dropout(kernel, training=True)), [kernel]
    )
    after = np.asarray(dropout.seed_generator.state.value)
    assert not np.array_equal(before, after)
    assert set(np.unique(gradient)) == {0.0, 2.0}


def _params() -> dict[str, object]:
    return {"kernel": jnp.arange(6.0).reshape(3, 2), "biases": [jnp.ones(2), 0.5]}


def _loss(params) -> jax.Array:
    first, second = params["biases"]
    return jnp.sum(jnp.tanh(jnp.ones((4, 3)) @ params["kernel"] / 9 + first) * second)


def test_gradients_of_a_pytree_of_arrays_are_those_of_jax(tolerance) -> None:
    value, gradients = sg.value_and_grad(_loss, _params())
    expected_value, expected = jax.value_and_grad(_loss)(_params())
    np.testing.assert_allclose(value, expected_value, **tolerance("float32"))
    assert jax.tree.structure(gradients) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), gradients, expected)


def test_gradient_by_an_unused_array_is_zero_and_aux_comes_through() -> None:
    (value, aux), gradients = sg.value_and_grad(
        lambda params: (params[0] ** 2, "rest"), (3.0, jnp.ones(2)), has_aux=True
    )
    assert (float(value), aux, float(gradients[0])) == (9.0, "rest", 6.0)
    assert gradients[1].tolist() == [0, 0]


def test_gradients_by_arrays_keep_what_is_assigned_to_variables(in_replicas) -> None:
    counter = keras.Variable(0.0)

    def step(x):
        def loss(params):
            counter.assign_add(1.0)
            return jnp.sum(params["w"] * x) * 1.0

        return sg.value_and_grad(loss, {"w": jnp.float32(2.0)})

    value, gradients = in_replicas(step, jnp.arange(3.0))
    assert (float(value), float(gradients["w"]), float(counter.value)) == (6.0, 3.0, 1.0)


@pytest.fixture(params=[(1, False), (1, True), (2, False), (2, True)])
def in_replicas(request):
    count, eagerly = request.param
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    sg.config.run_eagerly(eagerly)
    yield lambda fn, *args: jax.tree.map(
        lambda leaf: strategy.local_results(leaf)[0],
        strategy.run(fn, args=args),
        is_leaf=lambda leaf: isinstance(leaf, sg.PerReplica),
    )
    sg.config.run_eagerly(False)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ([jnp.ones(2), keras.Variable(1.0)], r"received a pytree of ArrayImpl, Variable\."),
        ([sg.PerReplica(stacked=jnp.ones(2))], r"received a pytree of PerReplica\."),
        ({"n": 3}, "cannot differentiate by an array of dtype int32"),
    ],
)
def test_what_cannot_be_differentiated_by_is_named(variables, message) -> None:
    with pytest.raises(TypeError, match=message):
        sg.value_and_grad(lambda *_: 1.0, variables)
