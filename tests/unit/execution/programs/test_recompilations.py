"""Warning about steps that are compiled again and again."""

from __future__ import annotations

import gc
from typing import Any

import jax.numpy as jnp
import pytest

import stratagem as sg


@pytest.fixture
def strategy() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.slow
def test_step_that_is_compiled_again_and_again_is_named(strategy) -> None:
    def call(batch: Any) -> Any:
        def step() -> Any:
            return jnp.sum(batch)

        gc.collect()  # the programs of earlier calls are gone, and count all the same
        return strategy.run(step)

    call(jnp.ones(2))
    call(jnp.ones(2))
    with pytest.warns(
        RuntimeWarning, match=r"step \(.*test_recompilations.py:\d+\) was comp"
    ) as caught:
        call(jnp.ones(2))
    assert "the values of ['batch'] in it differ" in str(caught[0].message)


@pytest.mark.slow
@pytest.mark.parametrize("is_function", [False, True])
def test_the_sixth_kind_of_arguments_names_the_one_that_differs(strategy, is_function) -> None:
    def step(x: Any) -> Any:
        return x.sum()

    called = sg.function(step) if is_function else lambda x: strategy.run(step, args=(x,))
    if is_function:
        called(jnp.ones(8))  # not compiled
    for size in range(1, 6):
        called(jnp.ones(size))
    with pytest.warns(
        RuntimeWarning, match=r"for 6 kinds .*args\[0\]: float32\[5\] -> float32\[6\]"
    ):
        called(jnp.ones(6))
    called(jnp.ones(7))  # warned once


@pytest.mark.filterwarnings("error:.*kinds of arguments")
def test_kinds_of_arguments_that_are_used_again_are_no_recompilation(strategy) -> None:
    def step(x: Any) -> Any:
        return x.sum()

    for size in range(1, 9):
        for _ in range(2):
            strategy.run(step, args=(jnp.ones(size),))


@pytest.mark.filterwarnings("error:.*was compiled 3 times")
def test_other_kinds_of_arguments_are_no_recompilation(strategy) -> None:
    for size in range(1, 6):
        strategy.run(lambda x: x.sum(), args=(jnp.ones(size),))


@pytest.mark.filterwarnings("error:.*was compiled 3 times")
def test_steps_of_a_factory_that_are_used_again_are_no_recompilation(strategy) -> None:
    def make(factor: Any) -> Any:
        return lambda x: x * factor

    for factor in range(4):
        step, compiled = make(factor), sg.function(make(factor))
        for _ in range(3):
            strategy.run(step, args=(1.0,))
            compiled(1.0)
