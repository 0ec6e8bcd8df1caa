"""Reads that wait: made once, before a program takes the memory of what they read."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import pytest

import stratagem as sg
from stratagem.variables.late_reads import LateRead, read_before_replacing


class _Counter:
    """Counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        return self.num_calls


def test_result_is_read_once() -> None:
    read = _Counter()
    late = LateRead(read)
    assert read.num_calls == 0
    assert [late.result(), late.result()] == [1, 1]
    read_before_replacing()
    assert read.num_calls == 1


def test_all_that_wait_are_read_before_values_are_replaced() -> None:
    reads = [_Counter(), _Counter()]
    waiting = [LateRead(read) for read in reads]
    read_before_replacing()
    assert [read.num_calls for read in reads] == [1, 1]
    assert [late.result() for late in waiting] == [1, 1]


def test_read_that_no_one_wants_is_not_made() -> None:
    dropped, lost = _Counter(), _Counter()
    late = LateRead(dropped)
    late.drop()
    LateRead(lost)
    gc.collect()
    read_before_replacing()
    assert (dropped.num_calls, lost.num_calls) == (0, 0)


def test_read_that_failed_is_tried_again() -> None:
    outcomes: list[Any] = [ValueError("too early"), 7]

    def read() -> Any:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    late = LateRead(read)
    with pytest.raises(ValueError, match="too early"):
        late.result()
    assert late.result() == 7


def _by_run(strategy: sg.Strategy, variable: Any) -> None:
    strategy.run(lambda: variable.assign_add(1.0))


def _by_function(strategy: sg.Strategy, variable: Any) -> None:
    sg.function(lambda: strategy.run(lambda: variable.assign_add(1.0)))()


@pytest.mark.parametrize("replace", [_by_run, _by_function])
def test_program_that_replaces_a_variable_leaves_the_value_read_before(
    replace: Callable[[sg.Strategy, Any], None],
) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope():
        variable: Any = keras.Variable(1.0)
    doubled = jax.jit(lambda value: 2 * value)
    for expected in (2.0, 4.0, 6.0):
        stored = variable.storage
        late = LateRead(lambda stored=stored: doubled(stored))
        replace(strategy, variable)
        assert stored.is_deleted(), "the program took another memory; nothing is tested"
        assert float(late.result()) == expected


def test_traced_program_makes_no_read() -> None:
    late = LateRead(lambda: jnp.ones(()))

    @jax.jit
    def traced() -> jax.Array:
        read_before_replacing()
        return jnp.zeros(())

    traced()
    assert float(late.result()) == 1.0  # a value, not a tracer
