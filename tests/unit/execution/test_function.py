"""sg.function: what it compiles, and what it runs as Python."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.parity.comparison import mirrored


def test_variables_of_no_strategy_are_state_too() -> None:
    variable = keras.Variable(1.0)
    num_traces = 0

    @sg.function
    def step(by: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        variable.assign(variable.value + by)
        return variable.value

    assert [float(step(1.0)) for _ in range(4)] == [2.0, 3.0, 4.0, 5.0]
    assert float(variable.value) == 5.0
    assert num_traces == 3, "as Python, without the variable, and with it as an input"


def test_static_arguments_are_part_of_the_program() -> None:
    seen: list[Any] = []

    @sg.function
    def step(x: Any, mode: str, *, twice: bool) -> Any:
        seen.append((mode, twice))
        return x * (2 if twice else 1)

    assert float(step(3.0, "c", twice=True)) == 6  # as Python
    assert [float(step(3.0, "a", twice=twice)) for twice in (True, False, True)] == [6, 3, 6]
    assert float(step(np.float32(3), "b", twice=True)) == 6
    assert seen == [("c", True), ("a", True), ("a", False), ("b", True)]


def test_methods_are_bound_and_names_are_kept() -> None:
    class Loop:
        """Holds a step."""

        def __init__(self, by: float) -> None:
            self.by = by

        @sg.function
        def step(self, x: Any) -> Any:
            """Multiplies."""
            return x * self.by

    assert [float(Loop(by).step(2.0)) for by in (2.0, 3.0, 4.0)] == [4.0, 6.0, 8.0]
    assert Loop.step.__name__ == "step"
    assert Loop.step.__doc__ == "Multiplies."


def test_function_in_a_replica_is_the_function_itself() -> None:
    strategy = mirrored(2)
    kinds: list[str] = []

    @sg.function
    def inner(x: Any) -> Any:
        kinds.append(type(x).__name__)
        return x + 1

    @sg.function
    def outer(x: Any) -> Any:
        return inner(strategy.run(inner, args=(x,)).components[0])

    assert [float(outer(1.0)) for _ in range(4)] == [3.0] * 4
    of_replica, of_itself, compiled = kinds
    assert "Tracer" in of_replica
    assert "Tracer" not in of_itself
    assert "Tracer" in compiled


def test_each_use_of_a_strategy_makes_it_python_and_happens_once_a_call() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(1.0)
    dataset = strategy.distribute_dataset([np.arange(2)] * 3)
    iterator = iter(dataset)

    def scope() -> None:
        with strategy.scope():
            pass

    uses: list[Any] = [
        lambda: strategy.run(lambda: None),
        lambda: strategy.reduce("mean", 1.0, axis=None),
        lambda: strategy.gather(1.0, axis=0),
        lambda: len(list(dataset)),
        lambda: next(iterator),
        lambda: variable.value,
        lambda: variable.assign(2.0),
        scope,
    ]
    same, parts = sg.function(lambda value: value), sg.PerReplica(stacked=np.ones(2))
    assert [same(parts) is parts for _ in range(3)] == [True] * 3
    for use in uses:
        seen: list[Any] = []

        @sg.function
        def function(x: Any, use: Any = use, seen: Any = seen) -> Any:
            seen.append(x)
            use()
            return x

        for number in range(3):
            assert function(number) == number
        assert seen == [0, 1, 2], uses.index(use)


def test_strategy_that_a_later_call_uses_ends_the_compilation() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(1.0)
    seen: list[float] = []

    @sg.function
    def step(x: Any, where: str) -> Any:
        seen.append(x)
        if where == "variable":
            variable.assign_add(1.0)
        if where == "run":
            x = strategy.reduce("sum", strategy.run(jnp.square, args=(x,)), axis=None)
        return x + 1

    assert float(step(1.0, "nowhere")) == float(step(1.0, "nowhere")) == 2.0
    assert float(step(2.0, "run")) == 9.0
    assert float(step(2.0, "variable")) == float(step(2.0, "variable")) == 3.0
    assert float(variable.value) == 3.0
    assert seen[-2:] == [2.0, 2.0]
    again = sg.function(step.__wrapped__)
    assert [float(again(1.0, "nowhere")) for _ in range(2)] == [2.0, 2.0]
    assert float(again(1.0, "variable")) == 2.0
    assert float(variable.value) == 4.0


def test_arrays_of_the_host_are_arrays_of_jax_in_the_function() -> None:
    strategy = mirrored(2)
    for use in (lambda: None, lambda: strategy.reduce("mean", 1.0, axis=None)):
        step = sg.function(lambda x, use=use: (use(), x["rows"].at[0].set(1.0))[1])
        for _ in range(3):
            assert step({"rows": np.zeros(2, "float32")}).tolist() == [1.0, 0.0]


def test_keras_model_without_a_strategy_is_trained_in_one_program() -> None:
    x, y = np.arange(8.0, dtype="float32").reshape(4, 2), np.ones((4, 1), "float32")
    num_traces = 0

    def trained(wrap: Any) -> list[Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Dense(4), keras.layers.Dropout(0.5)])
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        optimizer, metric = keras.optimizers.Adam(0.1), keras.metrics.Mean()

        @wrap
        def step(x: Any, y: Any) -> Any:
            nonlocal num_traces
            num_traces += 1
            loss, grads = sg.value_and_grad(
                lambda: jnp.mean((model(x, training=True) - y) ** 2), model.trainable_variables
            )
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            metric.update_state(loss)
            return loss

        model.build(x.shape)
        losses = [float(step(x, y)) for _ in range(4)]
        return [losses, metric.result(), *model.get_weights()]

    expected, got = trained(lambda fn: fn), trained(sg.function)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
    assert num_traces == 4 + 3


@pytest.mark.parametrize("initial", [1.0, jnp.ones(2)])
def test_variables_made_at_every_call_are_refused(initial: Any) -> None:
    step = sg.function(lambda: sg.Variable(initial).value)
    np.testing.assert_array_equal(step(), initial)
    with pytest.raises(ValueError, match="and another one on its second call"):
        step()


def test_branching_on_a_value_says_what_it_is() -> None:
    step = sg.function(lambda x: 1 if x > 0 else 2)
    assert step(1.0) == 1
    with pytest.raises(Exception, match="traced"):
        step(1.0)
