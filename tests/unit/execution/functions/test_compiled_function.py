"""sg.function: what it traces, what it leaves alone and what it refuses."""

from __future__ import annotations

import contextlib
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

    assert [float(step(1.0)) for _ in range(3)] == [2.0, 3.0, 4.0]
    assert float(variable.value) == 4.0
    assert num_traces == 2


def test_static_arguments_are_part_of_the_program() -> None:
    seen: list[Any] = []

    @sg.function
    def step(x: Any, mode: str, *, twice: bool) -> Any:
        seen.append((mode, twice))
        return x * (2 if twice else 1)

    assert [float(step(3.0, "a", twice=twice)) for twice in (True, False, True)] == [6, 3, 6]
    assert float(step(np.float32(3), "b", twice=True)) == 6
    assert seen == [("a", True), ("a", False), ("b", True)]


def test_methods_are_bound_and_names_are_kept() -> None:
    class Loop:
        """Holds a step."""

        def __init__(self, by: float) -> None:
            self.by = by

        @sg.function
        def step(self, x: Any) -> Any:
            """Multiplies."""
            return x * self.by

    assert [float(Loop(by).step(2.0)) for by in (2.0, 3.0)] == [4.0, 6.0]
    assert Loop.step.__name__ == "step"
    assert Loop.step.__doc__ == "Multiplies."


def test_function_in_a_function_and_in_a_replica_is_the_function_itself() -> None:
    strategy = mirrored(2)
    kinds: list[str] = []

    @sg.function
    def inner(x: Any) -> Any:
        kinds.append(type(x).__name__)
        return x + 1

    @sg.function
    def outer(x: Any) -> Any:
        return inner(strategy.run(inner, args=(x,)).stacked[0])

    assert float(outer(1.0)) == 3.0
    assert len(kinds) == 2
    assert all("Tracer" in kind for kind in kinds)


def test_eager_function_runs_as_it_stands() -> None:
    sg.config.run_eagerly(True)
    try:
        assert sg.function(lambda x: isinstance(x, float))(1.0) is True
    finally:
        sg.config.run_eagerly(False)


def test_data_is_not_read_in_a_function() -> None:
    strategy = mirrored(2)
    dataset = strategy.distribute_dataset([np.zeros(2)] * 2)
    iterator = iter(dataset)
    for wrong in (
        lambda: next(iterator),
        lambda: list(dataset),
        lambda: strategy.run_steps(jnp.sum, iterator, 1),
    ):
        with pytest.raises(ValueError, match=r"inside an sg.function.\nExpected data as an"):
            sg.function(wrong)()
    assert len(list(iterator)) == 2


def test_variables_of_two_strategies_are_refused() -> None:
    variables = []
    for strategy in (mirrored(2), mirrored(3)):
        with strategy.scope():
            variables.append(sg.Variable(1.0))
    with pytest.raises(RuntimeError, match=r"An sg.function uses variables of Mirrored"):
        sg.function(lambda: [variable.value for variable in variables])()


@pytest.mark.parametrize("make", [lambda: mirrored(2), sg.get_strategy])
def test_variables_are_not_made_in_the_function_itself(make: Any) -> None:
    strategy = make()

    @sg.function
    def step() -> Any:
        with strategy.scope() if strategy is not sg.get_strategy() else contextlib.nullcontext():
            return keras.Variable(1.0).value

    with pytest.raises(ValueError, match=r"A variable was created in an sg.function, in cross-rep"):
        step()


def test_replica_function_that_makes_variables_at_every_call_is_refused() -> None:
    strategy = mirrored(2)
    with pytest.raises(ValueError, match="and another one on its second call"):
        sg.function(lambda: strategy.run(lambda: sg.Variable(1.0).value))()


def test_error_of_the_function_comes_out_and_changes_nothing() -> None:
    strategy = mirrored(2)
    with strategy.scope():
        variable = sg.Variable(1.0)

    @sg.function
    def step() -> None:
        variable.assign(2.0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step()
    assert float(variable.value) == 1.0


def test_branching_on_a_value_says_what_it_is() -> None:
    with pytest.raises(Exception, match="traced"):
        sg.function(lambda x: 1 if x > 0 else 2)(1.0)
