"""`value_and_grad`: local gradients with respect to Keras variables."""

from __future__ import annotations

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import assert_parts, contribution


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return [sg.Variable(3.0, name="first"), sg.Variable([1.0, 2.0], name="second")]


def test_gradients_are_local_to_the_replica(strategy, execution, weights) -> None:
    """Of (i + 1) * w^2 at w = 3, seen from replica i: 6 (i + 1)."""
    first, _ = weights

    def step():
        value, (gradient,) = sg.value_and_grad(lambda: contribution() * first * first, [first])
        return value, gradient

    value, gradient = strategy.run(step)
    assert_parts(strategy, value, lambda i: 9.0 * (i + 1))
    assert_parts(strategy, gradient, lambda i: 6.0 * (i + 1))


def test_gradients_have_the_structure_of_the_variables(strategy, execution, weights) -> None:
    first, second = weights
    with strategy.scope():
        unread = sg.Variable(1.0)
    structure = {"a": first, "b": [second, (unread,)]}

    def step():
        return sg.value_and_grad(lambda: keras.ops.sum(second * second) * first, structure)

    value, gradients = strategy.run(step)
    assert gradients["b"][1] == (None,)
    assert_parts(strategy, value, lambda _: 15.0)
    assert_parts(strategy, gradients["a"], lambda _: 5.0)
    assert_parts(strategy, gradients["b"][0], lambda _: [6.0, 12.0])


def test_gradient_is_none_where_the_variable_was_not_read(strategy, execution, weights) -> None:
    first, second = weights

    def loss():
        return first * first

    _, gradients = strategy.run(lambda: sg.value_and_grad(loss, [first, second]))
    assert gradients[1] is None


def test_integers_have_no_gradient(strategy, execution, weights) -> None:
    with strategy.scope():
        counter = sg.Variable(2, dtype="int32")

    def loss():
        return weights[0] * keras.ops.cast(counter, "float32")

    _, gradients = strategy.run(lambda: sg.value_and_grad(loss, [counter, weights[0]]))
    assert gradients[0] is None
    assert_parts(strategy, gradients[1], lambda _: 2.0)


def test_gradient_has_the_dtype_of_the_variable(strategy, execution) -> None:
    with strategy.scope():
        half = sg.Variable([1.0, 2.0], dtype="bfloat16")

    def loss():
        return jnp.sum(half.value.astype("float32") ** 2)

    value, (gradient,) = strategy.run(lambda: sg.value_and_grad(loss, [half]))
    assert {part.dtype.name for part in strategy.local_results(gradient)} == {"bfloat16"}
    assert_parts(strategy, gradient, lambda _: [2.0, 4.0])
    assert_parts(strategy, value, lambda _: 5.0)


def test_aux_comes_back_beside_the_value(strategy, execution, weights) -> None:
    first, _ = weights

    def step():
        def loss():
            return first * first, {"i": contribution(), "name": "aux"}

        return sg.value_and_grad(loss, (first,), has_aux=True)

    (value, aux), (gradient,) = strategy.run(step)
    assert aux["name"] == "aux"
    assert_parts(strategy, aux["i"], lambda i: i + 1)
    assert_parts(strategy, value, lambda _: 9.0)
    assert_parts(strategy, gradient, lambda _: 6.0)


def test_what_the_function_assigns_is_kept(strategy, execution, weights) -> None:
    n = strategy.num_replicas_in_sync
    first, _ = weights
    with strategy.scope():
        total = sg.Variable(0.0, trainable=False, aggregation="sum")
        own = sg.Variable(0.0, synchronization="on_read", aggregation="mean")

    def step():
        def loss():
            total.assign_add(contribution())
            own.assign(contribution())
            return first * total

        return sg.value_and_grad(loss, [first])

    value, (gradient,) = strategy.run(step)
    expected = n * (n + 1) / 2
    assert float(total.value) == expected
    assert float(own.value) == (n + 1) / 2
    assert_parts(strategy, value, lambda _: 3 * expected)
    assert_parts(strategy, gradient, lambda _: expected)


def test_assignment_without_aggregation_that_differs_is_refused_inside_too(
    distributing, execution
) -> None:
    with distributing.scope():
        weight, drifting = sg.Variable(1.0), sg.Variable(1.0, trainable=False)

    def loss():
        drifting.assign(contribution())
        return weight * weight

    with pytest.raises(ValueError, match="whose aggregation is NONE"):
        distributing.run(lambda: sg.value_and_grad(loss, [weight]))


def test_sum_of_local_gradients_is_that_of_the_whole_batch(strategy, execution) -> None:
    """Mean squared error of a linear model, against the closed form in NumPy."""
    n = strategy.num_replicas_in_sync
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(n, 4, 3)), rng.normal(size=(n, 4))
    start = rng.normal(size=3)
    with strategy.scope():
        weight = sg.Variable(start.astype("float32"))
    data = strategy.distribute_values_from_function(
        lambda c: [jnp.asarray(part[c.replica_id_in_sync_group], "float32") for part in (x, y)]
    )

    def step(features, targets):
        def loss():
            residual = features @ weight.value - targets
            return jnp.sum(residual**2) / (4 * n)

        _, (gradient,) = sg.value_and_grad(loss, [weight])
        return sg.get_replica_context().all_reduce("sum", gradient)

    rows, wanted = x.reshape(-1, 3), y.ravel()
    expected = 2 * rows.T @ (rows @ start - wanted) / len(wanted)
    got = strategy.run(step, args=tuple(data))
    for part in strategy.local_results(got):
        np.testing.assert_allclose(part, expected, rtol=1e-5, atol=1e-6)


def test_nested_use_gives_second_derivatives(strategy, execution, weights) -> None:
    first, _ = weights

    def slope():
        _, (gradient,) = sg.value_and_grad(lambda: first * first * first, [first])
        return gradient

    value, (gradient,) = strategy.run(lambda: sg.value_and_grad(slope, [first]))
    assert_parts(strategy, value, lambda _: 27.0)
    assert_parts(strategy, gradient, lambda _: 18.0)


@pytest.mark.parametrize("has_aux", [False, True])
def test_value_that_is_no_scalar_is_refused(strategy, execution, weights, has_aux) -> None:
    second = weights[1]

    def loss():
        return (second * 2.0, None) if has_aux else second * 2.0

    with pytest.raises(ValueError, match=r"returned a value of shape \(2,\)"):
        strategy.run(lambda: sg.value_and_grad(loss, [second], has_aux=has_aux))


def test_exception_in_the_function_comes_out_unchanged(strategy, execution, weights) -> None:
    def loss():
        raise LookupError("in the loss")

    with pytest.raises(LookupError, match="in the loss"):
        strategy.run(lambda: sg.value_and_grad(loss, weights))


def test_works_outside_replica_functions_on_variables_of_the_strategy(strategy, weights) -> None:
    first, second = weights
    counted = keras.Variable(0.0, trainable=False)

    def loss():
        counted.assign_add(1.0)
        return keras.ops.sum(second * second) * first

    value, gradients = sg.value_and_grad(loss, weights)
    assert float(value) == 15.0
    assert float(gradients[0]) == 5.0
    np.testing.assert_array_equal(gradients[1], [6.0, 12.0])
    assert float(counted.value) == 1.0
