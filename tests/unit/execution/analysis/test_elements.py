"""Operations by element: those that a device may do for its own part of an array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stratagem.execution.analysis.replication import is_by_element


def equation(function: Any) -> Any:
    """The only operation of a function of a matrix."""
    (eqn,) = jax.make_jaxpr(function)(jnp.ones((2, 3))).jaxpr.eqns
    return eqn


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jax.lax.sqrt(x),
        lambda x: x * 2.0,
        lambda x: x**3,
        jax.jit(lambda x: jnp.exp(x) - x),
    ],
    ids=["sqrt", "product", "power", "inner"],
)
def test_elements_of_the_result_follow_from_the_same_elements(function) -> None:
    assert is_by_element(equation(function))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.T,
        lambda x: jax.lax.cumsum(x),
        jax.jit(lambda x: x - jnp.sum(x)),
        lambda x: jax.lax.rev(x, (0,)),
    ],
    ids=["transpose", "running sum", "inner sum", "reversed"],
)
def test_others_do_not(function) -> None:
    assert not is_by_element(equation(function))


def test_callers_may_allow_more() -> None:
    eqn = equation(lambda x: jax.lax.rev(x, (0,)))
    assert is_by_element(eqn, also=("rev",))
    inner = equation(jax.jit(lambda x: jax.lax.rev(x, (0,)) + x))
    assert not is_by_element(inner)
    assert is_by_element(inner, also=("rev",))
