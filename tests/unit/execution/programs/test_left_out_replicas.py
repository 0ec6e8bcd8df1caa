"""Steps that may leave replicas out, and the reasons of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.elastic_program import own_outputs, reason_to_wait
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.functionalize import Trace
from stratagem.execution.tracing.tracer import trace_replica_function


class _Variables:
    """A strategy of two devices, and variables of all kinds."""

    def __init__(self) -> None:
        self.strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        with self.strategy.scope():
            self.weight = sg.Variable(np.ones((3, 1), np.float32))
            self.statistic = sg.Variable(0.0, trainable=False)
            self.count = sg.Variable(
                0.0, trainable=False, synchronization="on_read", aggregation="sum"
            )

    def trace(self, fn: Callable[[Any], Any]) -> Trace:
        parts = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
        value = self.strategy.distribute_values_from_function(
            lambda context: parts[context.replica_id_in_sync_group]
        )
        arguments = flatten_arguments((value,), {}, num_replicas=2)
        return trace_replica_function(self.strategy, fn, arguments)


@pytest.fixture
def variables() -> _Variables:
    return _Variables()


def _train(variables: _Variables, x: Any) -> Any:
    def loss() -> Any:
        return jnp.sum(jnp.square(x @ variables.weight.value)) / 8

    value, (gradient,) = sg.value_and_grad(loss, [variables.weight])
    context = sg.get_replica_context()
    variables.weight.assign_sub(0.1 * context.all_reduce("sum", gradient))
    return value


def _train_and_count(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x))
    return _train(variables, x), sg.get_replica_context().all_reduce("sum", jnp.sum(x))


def test_a_training_step_may_leave_replicas_out(variables) -> None:
    trace = variables.trace(lambda x: _train_and_count(variables, x))
    assert reason_to_wait(trace) is None
    written = [one is variables.count for one in trace.written]
    # A replica's count and loss are its own; the sum is not.
    assert own_outputs(trace) == [*written, True, False]
    assert any(written)


def _evaluate(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x @ variables.weight.value))


def _predict_with_dropout(variables: _Variables, x: Any) -> Any:
    variables.statistic.assign(variables.statistic + 1.0)
    return x @ variables.weight.value


def _train_apart(variables: _Variables, x: Any) -> Any:
    del x
    variables.weight.assign(variables.weight * 0.5)


def _gather(variables: _Variables, x: Any) -> Any:
    return _train(variables, x), sg.get_replica_context().all_gather(x, axis=0)


def _read_counts(variables: _Variables, x: Any) -> Any:
    variables.count.assign_add(jnp.sum(x))
    return _train(variables, x), sg.get_replica_context().all_reduce("sum", variables.count.value)


def _print(variables: _Variables, x: Any) -> Any:
    jax.debug.print("{}", x[0, 0])
    return _train(variables, x)


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (_evaluate, "trains no variable"),
        (_predict_with_dropout, "trains no variable"),
        (_train_apart, "sums nothing over replicas"),
        (_gather, "exchange rows"),
        (_read_counts, "what each replica has counted"),
        (_print, "functions of the host"),
    ],
)
def test_other_steps_wait_for_all(variables, step, words) -> None:
    assert words in str(reason_to_wait(variables.trace(lambda x: step(variables, x))))


def test_a_variable_without_a_strategy_does_not_hinder(variables) -> None:
    foreign = keras.Variable(0.0, trainable=False)

    def step(x: Any) -> Any:
        foreign.assign(foreign + 1.0)
        return _train(variables, x)

    trace = variables.trace(step)
    assert reason_to_wait(trace) is None
    assert own_outputs(trace) == [False, False, True]
