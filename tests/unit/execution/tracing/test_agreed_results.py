"""Assigned values and lengths of results, by what may differ between replicas."""

from __future__ import annotations

import types
from typing import Any

import jax
import numpy as np
import pytest

from stratagem.execution.tracing.tracer import use_agreement


def trace_of(function: Any, differing: list[bool], num_written: int = 1) -> Any:
    """A trace of a function that assigns its first results to variables and returns the others."""
    jaxpr = jax.make_jaxpr(function, axis_env=[("replica", 2)])(*np.ones((2, 3), np.float32))
    written = [types.SimpleNamespace(name=f"v{n}", path=f"v{n}") for n in range(num_written)]
    outputs = range(len(jaxpr.out_avals) - num_written)
    return types.SimpleNamespace(
        jaxpr=jaxpr,
        differing_inputs=differing,
        written=written,
        results=[(True, output) for output in outputs],
        result_lengths=[(3, 2) for _ in outputs],
    )


def test_assigned_value_that_may_differ_is_an_error_if_it_is_unproven() -> None:
    trace = trace_of(lambda own, shared: [own * shared], [True, False])
    use_agreement(trace, frozenset(), object())
    with pytest.raises(ValueError, match="v0"):
        use_agreement(trace, {id(trace.written[0])}, object())


def test_assigned_value_that_is_equal_or_summed_is_none() -> None:
    for function in (
        lambda own, shared: [shared * 2],
        lambda own, shared: [jax.lax.psum(own, "replica")],
    ):
        trace = trace_of(function, [True, False])
        use_agreement(trace, {id(trace.written[0])}, object())


def test_equal_results_lose_their_lengths_and_own_rows_keep_them() -> None:
    trace = trace_of(lambda own, shared: [own, jax.lax.psum(own, "replica")], [True, False], 0)
    trace.results.append((False, "text"))
    trace.result_lengths.append(None)
    use_agreement(trace, frozenset(), object())
    assert trace.result_lengths == [(3, 2), None, None]
