"""Which replica function ends a program that is planned."""

from __future__ import annotations

import jax.numpy as jnp
import pytest

import stratagem as sg
from stratagem.execution.programs.step_capture import StepCaptured, capture


@pytest.fixture
def strategy() -> sg.MirroredStrategy:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


def test_first_function_that_changes_a_trainable_variable_is_taken(strategy) -> None:
    with strategy.scope():
        trained = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
        counted = sg.Variable(0.0, trainable=False, aggregation=sg.VariableAggregation.MEAN)
    reached: list[str] = []

    def program() -> None:
        strategy.run(lambda: counted.assign_add(trained.value))
        reached.append("counted")
        strategy.run(lambda x: trained.assign_add(x), args=(2.0,))
        reached.append("trained")

    step = capture(program)
    assert reached == ["counted"]
    assert step is not None
    assert step.trace.written == [trained]
    assert step.strategy is strategy
    assert (float(counted.value), float(trained.value)) == (1.0, 1.0)


def test_any_function_may_be_wanted(strategy) -> None:
    step = capture(lambda: strategy.run(jnp.negative, args=(1.0,)), takes_all=True)
    assert step is not None
    assert step.fn is jnp.negative
    assert step.optimizers == ()


def test_program_that_trains_nothing(strategy) -> None:
    assert capture(lambda: None) is None
    with strategy.scope():
        trained = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
    strategy.run(lambda: trained.assign(3.0))  # nothing is captured behind it
    assert float(trained.value) == 3.0


def test_what_ends_the_program_is_no_error() -> None:
    assert not issubclass(StepCaptured, Exception)


def test_error_of_the_program_goes_through(strategy) -> None:
    with pytest.raises(ZeroDivisionError):
        capture(lambda: strategy.run(lambda: 1 / 0))
    with strategy.scope():
        trained = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
    strategy.run(lambda: trained.assign(2.0))  # and nothing is captured behind it
    assert float(trained.value) == 2.0
