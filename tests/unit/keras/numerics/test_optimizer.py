"""Optimizers in replica functions: gradients are summed once, then all copies take one update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.contract.parts import seldom_eager
from tests.marks import slow
from tests.parity.comparison import mirrored
from tests.unit.keras.replicas import copies_of, per_replica, values_of

# Two variables; the gradient that each of two replicas brings for them.
_START = [np.asarray([1.0, -2.0], "float32"), np.asarray(0.5, "float32")]
_GRADIENTS = [
    [np.asarray([3.0, 0.5], "float32"), np.asarray(1.0, "float32")],
    [np.asarray([-1.0, 4.0], "float32"), np.asarray(2.0, "float32")],
]


def _variables(**arguments: Any) -> list[Any]:
    return [keras.Variable(value, **arguments) for value in _START]


def _made(make_optimizer: Callable[[], Any], num_replicas: int = 2) -> tuple[Any, list[Any], Any]:
    """A strategy, and variables and an optimizer of its scope."""
    strategy = mirrored(num_replicas)
    with strategy.scope():
        return strategy, _variables(), make_optimizer()


def _apply(
    strategy: Any, optimizer: Any, variables: list[Any], gradients: Any = _GRADIENTS
) -> None:
    """One step in which each replica brings its own gradients."""
    columns = [per_replica(strategy, column) for column in zip(*gradients, strict=True)]
    strategy.run(lambda *grads: optimizer.apply(list(grads), variables) and None, args=columns)


def _on_one_device(optimizer: Any, num_steps: int, gradients: Any = _GRADIENTS) -> list[np.ndarray]:
    variables = _variables()
    summed = [np.sum(column, axis=0) for column in zip(*gradients, strict=True)]
    for _ in range(num_steps):
        optimizer.apply([jnp.asarray(grad) for grad in summed], variables)
    return values_of([*variables, *optimizer.variables])


@seldom_eager
def test_steps_are_those_of_one_device_with_the_summed_gradients(execution: str) -> None:
    """All copies take the same update, which counts once."""
    options: Any = {"learning_rate": 0.1, "momentum": 0.9, "global_clipnorm": 1.5}
    strategy, variables, optimizer = _made(lambda: keras.optimizers.SGD(**options))
    for num_steps in (1, 2):
        _apply(strategy, optimizer, variables)
        expected = _on_one_device(keras.optimizers.SGD(**options), num_steps)
        everything = [*variables, *optimizer.variables]
        for variable, value, wanted in zip(
            everything, values_of(everything), expected, strict=True
        ):
            np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(*copies_of(variable))


def test_clipping_sees_the_sum_and_not_the_part_of_a_replica() -> None:
    strategy, variables, optimizer = _made(lambda: keras.optimizers.SGD(1.0, clipvalue=2.5))
    _apply(strategy, optimizer, variables)
    # The sums are [2, 4.5] and 3; the parts, clipped before, would give [1.5, 3] and 3.
    np.testing.assert_allclose(np.asarray(variables[0]), [1.0 - 2.0, -2.0 - 2.5])
    np.testing.assert_allclose(np.asarray(variables[1]), 0.5 - 2.5)


def test_variable_without_a_gradient_is_left_alone() -> None:
    strategy, variables, optimizer = _made(lambda: keras.optimizers.SGD(0.1))
    first = per_replica(strategy, [gradients[0] for gradients in _GRADIENTS])

    def step(grad: Any) -> None:
        optimizer.apply([grad, None], variables)

    with pytest.warns(UserWarning, match="Gradients do not exist for variables"):
        strategy.run(step, args=(first,))
    np.testing.assert_allclose(np.asarray(variables[0]), [1.0 - 0.2, -2.0 - 0.45], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(variables[1]), _START[1])


def test_constraint_holds_after_the_update() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variables = _variables()
        variables[0].constraint = keras.constraints.NonNeg()
        optimizer = keras.optimizers.SGD(0.1)
    _apply(strategy, optimizer, variables)
    for copy in copies_of(variables[0]):
        np.testing.assert_allclose(copy, [0.8, 0.0], rtol=1e-6)


def test_stateless_apply_in_a_scan_sums_over_replicas() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variables = _variables()
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=2.5)
        optimizer.build(variables)

    def step(*grads: Any) -> Any:
        def body(carry: Any, _: Any) -> Any:
            trainable, state = carry
            return optimizer.stateless_apply(state, list(grads), trainable), None

        carry = ([v.value for v in variables], [v.value for v in optimizer.variables])
        (trainable, _), _ = jax.lax.scan(body, carry, length=2)
        return trainable

    columns = [per_replica(strategy, column) for column in zip(*_GRADIENTS, strict=True)]
    expected = _on_one_device(keras.optimizers.SGD(0.1, momentum=0.9, clipvalue=2.5), 2)
    for result, wanted in zip(strategy.run(step, args=columns), expected, strict=False):
        for part in strategy.local_results(result):
            np.testing.assert_allclose(np.asarray(part), wanted, rtol=1e-5)


@pytest.mark.parametrize("owner", ["another strategy", "no strategy"])
def test_variables_that_do_not_belong_are_refused(owner: str) -> None:
    strategy, other = mirrored(2), mirrored(3)
    if owner == "another strategy":
        with other.scope():
            variables = _variables(name="foreign")
    else:
        variables = _variables(name="foreign")
    with strategy.scope():
        optimizer = keras.optimizers.SGD(0.1)
    words = "under MirroredStrategy" if owner == "another strategy" else "outside its scope"
    with pytest.raises(ValueError, match=f"cannot train variable 'foreign'.*{words}"):
        _apply(strategy, optimizer, variables)


def _with_loss_scale() -> Any:
    return keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.1), initial_scale=8.0, dynamic_growth_steps=2
    )


def test_overflow_on_one_replica_skips_the_step_on_all() -> None:
    strategy, variables, optimizer = _made(_with_loss_scale)
    overflow = [_GRADIENTS[0], [np.asarray([1.0, np.inf], "float32"), _GRADIENTS[1][1]]]
    _apply(strategy, optimizer, variables, overflow)
    np.testing.assert_array_equal(np.asarray(variables[0]), _START[0])
    np.testing.assert_array_equal(np.asarray(variables[1]), _START[1])
    assert (float(optimizer.dynamic_scale.value), int(optimizer.iterations.value)) == (4.0, 0)
    _apply(strategy, optimizer, variables)
    # Summed gradients over the scale of 4, times the learning rate.
    np.testing.assert_allclose(np.asarray(variables[1]), 0.5 - 0.1 * 3.0 / 4.0, rtol=1e-6)
    assert (int(optimizer.step_counter.value), int(optimizer.iterations.value)) == (1, 1)
    _apply(strategy, optimizer, variables)
    assert float(optimizer.dynamic_scale.value) == 8.0


def test_scaled_loss_in_a_step_of_ones_own_trains_as_one_device_does() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = keras.Variable([1.0, 1.0])
        optimizer = _with_loss_scale()
        optimizer.build([variable])
    rows = np.arange(8, dtype="float32").reshape(4, 2) / 8

    def step(part: Any) -> None:
        def loss() -> Any:
            average = sg.compute_average_loss(keras.ops.square(part @ variable.value))
            return optimizer.scale_loss(average)

        _, grads = sg.value_and_grad(loss, [variable])
        optimizer.apply(grads, [variable])

    strategy.run(step, args=(per_replica(strategy, [rows[:2], rows[2:]]),))
    expected = 1.0 - 0.1 * 2 * rows.T @ (rows @ np.ones(2)) / 4
    np.testing.assert_allclose(np.asarray(variable), expected, rtol=1e-5)


@pytest.mark.parametrize(
    "how", [slow("skip_gradients_aggregation"), "experimental_aggregate_gradients"]
)
@seldom_eager
def test_gradients_that_are_reduced_already_are_taken_as_they_are(how: str, execution: str) -> None:
    strategy, variables, optimizer = _made(lambda: keras.optimizers.Adam(0.1))
    columns = [per_replica(strategy, column) for column in zip(*_GRADIENTS, strict=True)]

    def step(*grads: Any) -> None:
        summed = sg.get_replica_context().all_reduce("sum", list(grads))
        pairs = zip(summed, variables, strict=True)
        sg.apply_gradients(optimizer, pairs, **{how: how.startswith("skip")})

    strategy.run(step, args=columns)
    expected = _on_one_device(keras.optimizers.Adam(0.1), 1)
    for value, wanted in zip(values_of([*variables, *optimizer.variables]), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)

    def unreduced(*grads: Any) -> None:
        pairs = zip(grads, variables, strict=True)
        sg.apply_gradients(optimizer, pairs, skip_gradients_aggregation=True)

    with pytest.raises(ValueError, match="may differ between replicas"):
        strategy.run(unreduced, args=columns)
