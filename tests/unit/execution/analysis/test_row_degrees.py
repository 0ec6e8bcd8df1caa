"""How results grow with the rows of a batch, and what is no sum or mean over rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from stratagem.execution.analysis.row_degrees import MIXED, RowDegrees, row_degrees

_SIZES = (3, 6)
_WEIGHTS = jnp.linspace(0.1, 0.6, 8).reshape(4, 2)


def _analyzed(function: Callable[[Any], Any]) -> RowDegrees:
    traces = [jax.make_jaxpr(function)(jnp.ones((size, 4))) for size in _SIZES]
    return row_degrees(traces, _SIZES)


def _per_row(x: Any) -> Any:
    return jnp.sum(jnp.tanh(x @ _WEIGHTS) ** 2, axis=-1)


def _gradient(loss: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    return lambda x: jax.grad(lambda weights: loss(x, weights))(_WEIGHTS)


def _scanned(x: Any, weights: Any) -> Any:
    carried, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h * w.sum()), None), x, weights)
    return jnp.sum(carried)


_DEGREES: list[tuple[Callable[[Any], Any], float | None]] = [
    (_per_row, 0),
    (lambda x: jnp.mean(_per_row(x)), 0),
    (lambda x: jnp.sum(_per_row(x)), 1),
    (lambda x: jnp.sum(_per_row(x)) / 8, 1),
    (lambda x: jnp.sum(_per_row(x)) / len(x), 0),
    (lambda x: jnp.sum(_per_row(x)) / len(x) ** 2, -1),
    (lambda x: jnp.sum(x.reshape(-1, 2)), 1),
    (lambda x: jnp.mean(x.reshape(-1, 2)), 0),
    (lambda x: jnp.sum(jnp.concatenate([x, x * 2])), 1),
    (lambda x: jnp.sum(jnp.ones(len(x))), 1),
    (lambda x: jnp.sum(x) / jnp.sum(jnp.ones(len(x))), 0),
    (lambda x: jnp.sum(x) / (jnp.sum(jnp.float32(x > 0)) + 1e-7), 0),
    (lambda x: jnp.sum(x) / jnp.maximum(jnp.sum(jnp.float32(x > 0)), 1.0), 0),
    (lambda x: jnp.sum(x) + 5.0, MIXED),
    (lambda x: jnp.sum(x) + jnp.sum(_WEIGHTS**2), MIXED),
    (lambda x: jnp.mean(x) + jnp.sum(_WEIGHTS**2), 0),
    (lambda x: jnp.sum(x) + jnp.zeros(()), 1),
    (lambda x: jnp.where(jnp.sum(x) > 0, jnp.sum(x), 0.0), 1),
    (lambda x: jnp.sqrt(jnp.mean(x)), 0),
    (lambda x: jnp.exp(jnp.sum(x)), None),
    (lambda x: jnp.var(x, ddof=1), None),
    (lambda x: jnp.sum(x[: len(x) // 3]), 1),
    (lambda x: jax.lax.fori_loop(0, 3, lambda _, total: total + jnp.sum(x), 0.0), 1),
    (lambda x: jax.lax.while_loop(lambda t: t < 9.0, lambda t: t + jnp.sum(x), 0.0), None),
    (_gradient(lambda x, w: jnp.mean((x @ w) ** 2)), 0),
    (_gradient(lambda x, w: jnp.sum((x @ w) ** 2) / 8), 1),
    (_gradient(lambda x, w: jnp.sum(x @ w) + jnp.sum(w**2)), MIXED),
    (_gradient(lambda x, w: jnp.sum(jax.nn.log_softmax(x @ w)[:, 0])), 1),
    (_gradient(lambda x, w: jnp.mean(w[jnp.argmax(x, axis=1)])), 0),
    (_gradient(lambda x, w: jnp.sum(w[jnp.argmax(x, axis=1)])), 1),
    (_gradient(lambda x, w: _scanned(x, w)), 1),
    (_gradient(lambda x, w: _scanned(x, w) / len(x)), 0),
    (_gradient(lambda x, w: jnp.mean(jax.checkpoint(lambda a: jnp.tanh(a @ w))(x))), 0),
]


def _numbered(table: list[Any]) -> dict[str, Any]:
    return {"argvalues": table, "ids": [str(row) for row in range(len(table))]}


@pytest.mark.parametrize(("function", "degree"), **_numbered(_DEGREES))
def test_degree_of_a_result(function: Callable[[Any], Any], degree: float | None) -> None:
    assert _analyzed(function).degrees == [degree]


def test_degree_of_the_gradient_of_a_convolution() -> None:
    kernel = jnp.ones((2, 1, 1))

    def gradient(x: Any) -> Any:
        def loss(kernel: Any) -> Any:
            numbers = ("NWC", "WIO", "NWC")
            out = jax.lax.conv_general_dilated(
                x[:, :, None], kernel, (1,), "SAME", dimension_numbers=numbers
            )
            return jnp.sum(out)

        return jax.grad(loss)(kernel)

    assert _analyzed(gradient).degrees == [1]


_MIXING: list[Callable[[Any], Any]] = [
    lambda x: jnp.sqrt(jnp.mean(x)),
    lambda x: jnp.sum(x) / jnp.sum(jnp.float32(x > 0)),
    lambda x: jnp.max(x),
    lambda x: jnp.mean((x - jnp.mean(x, axis=0)) ** 2),
    lambda x: jnp.mean(x @ x.T),
    lambda x: jnp.mean(jax.nn.softmax(x, axis=0)),
    lambda x: jnp.mean(x) * jnp.mean(x**2),
    lambda x: jnp.mean(jnp.sort(x, axis=0)[0]),
]


@pytest.mark.parametrize("function", **_numbered(_MIXING))
def test_what_is_no_sum_or_mean_over_rows(function: Callable[[Any], Any]) -> None:
    assert _analyzed(function).mixing


_LINEAR: list[Callable[[Any], Any]] = [
    lambda x: jnp.mean(_per_row(x)) + 0.1 * jnp.sum(_WEIGHTS**2),
    lambda x: 0.5 * jnp.sum(x) / len(x) - jnp.mean(x**2) * _WEIGHTS[0, 0],
    lambda x: jnp.mean(jax.nn.softmax(x, axis=1)),
    lambda x: jnp.mean(x / jnp.max(x, axis=1, keepdims=True)),
    lambda x: jnp.mean(x * jnp.float32(jnp.arange(len(x)) < len(x))[:, None]),
    _gradient(lambda x, w: jnp.mean(jnp.exp(x @ w))),
]


@pytest.mark.parametrize("function", **_numbered(_LINEAR))
def test_what_is_made_of_sums_and_means_over_rows(function: Callable[[Any], Any]) -> None:
    found = _analyzed(function)
    assert found.combining
    assert not found.mixing


def test_rows_that_stay_apart_are_not_combined() -> None:
    assert not _analyzed(_per_row).combining


def test_functions_that_differ_by_rows_are_not_known() -> None:
    assert _analyzed(lambda x: jnp.sum(x) if len(x) == 3 else jnp.sum(x) * 2).degrees == [None]
