"""How results depend on the rows of a batch, and how they grow with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from stratagem.execution.row_effects import MIXED as MIXED_OF_ROW_DEGREES
from stratagem.execution.row_effects import (
    RowDegrees,
    RowEffect,
    keeps_rows,
    row_degrees,
    row_effects,
)

# Functions of one operation, row axis of the example and of the result: what no size tells.
_NUMBERS = lax.GatherDimensionNumbers((1, 2), collapsed_slice_dims=(0,), start_index_map=(0,))
_NOT_KEPT: dict[str, tuple[Callable[[Any], Any], int, int]] = {
    "every second row": (lambda x: lax.slice(x, (0, 0, 0), (3, 4, 2), (2, 1, 1)), 0, 0),
    "some rows": (lambda x: lax.slice(x, (1, 0, 0), (3, 4, 2)), 0, 0),
    "padded rows": (lambda x: lax.pad(x, 0.0, ((1, 0, 0), (0, 0, 0), (0, 0, 0))), 0, 0),
    "largest of the rows": (lambda x: lax.top_k(x, 1)[0], 2, 2),
    "rows in another order": (lambda x: lax.reshape(x, (4, 3, 2)), 0, 1),
    "along the rows": (lambda x: lax.broadcast_in_dim(x, (3, 4, 2, 3), (0, 1, 2)), 0, 3),
    "rows of a table": (lambda x: lax.gather(x, np.ones((3, 1), int), _NUMBERS, (1, 4, 2)), 0, 0),
}


@pytest.mark.parametrize("name", _NOT_KEPT)
def test_rows_that_depend_on_others_are_never_called_kept(name: str) -> None:
    function, row_axis, out_axis = _NOT_KEPT[name]
    eqn = jax.make_jaxpr(function)(np.ones((3, 4, 2), "float32")).eqns[-1]
    in_axes = [row_axis, *[None] * (len(eqn.invars) - 1)]
    assert not keeps_rows(eqn, in_axes, [out_axis] * len(eqn.outvars))


# How results grow with the rows of a batch, and what is no sum or mean over rows.

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
    (lambda x: jnp.sum(x) + 5.0, MIXED_OF_ROW_DEGREES),
    (lambda x: jnp.sum(x) + jnp.sum(_WEIGHTS**2), MIXED_OF_ROW_DEGREES),
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
    (_gradient(lambda x, w: jnp.sum(x @ w) + jnp.sum(w**2)), MIXED_OF_ROW_DEGREES),
    (_gradient(lambda x, w: jnp.sum(jax.nn.log_softmax(x @ w)[:, 0])), 1),
    (_gradient(lambda x, w: jnp.mean(w[jnp.argmax(x, axis=1)])), 0),
    (_gradient(lambda x, w: jnp.sum(w[jnp.argmax(x, axis=1)])), 1),
    (_gradient(lambda x, w: _scanned(x, w)), 1),
    (_gradient(lambda x, w: _scanned(x, w) / len(x)), 0),
    (_gradient(lambda x, w: jnp.mean(jax.checkpoint(lambda a: jnp.tanh(a @ w))(x))), 0),
]


def _convolved(x: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return jax.grad(
        lambda kernel: jnp.sum(
            jax.lax.conv_general_dilated(
                x[:, :, None], kernel, (1,), "SAME", dimension_numbers=numbers
            )
        )
    )(jnp.ones((2, 1, 1)))


_DEGREES.append((_convolved, 1))


def _numbered(table: list[Any]) -> dict[str, Any]:
    return {"argvalues": table, "ids": [str(row) for row in range(len(table))]}


@pytest.mark.parametrize(("function", "degree"), **_numbered(_DEGREES))
def test_degree_of_a_result(function: Callable[[Any], Any], degree: float | None) -> None:
    assert _analyzed(function).degrees == [degree]


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
    assert not _analyzed(_per_row).combining


def test_functions_that_differ_by_rows_are_not_known() -> None:
    assert _analyzed(lambda x: jnp.sum(x) if len(x) == 3 else jnp.sum(x) * 2).degrees == [None]


# Effects that are read off a function's operations, beside what they must be.

_ROWS, _SUM, _MEAN = RowEffect.ROWS, RowEffect.SUM, RowEffect.MEAN
_MIXED, _UNKNOWN = RowEffect.MIXED, RowEffect.UNKNOWN


def _convolved_rows(x: Any) -> Any:
    numbers = ("NWC", "WIO", "NWC")
    return lax.conv_general_dilated(x, jnp.ones((2, 3, 1)), (1,), "SAME", dimension_numbers=numbers)


# Functions of x, shape (rows, 5, 3), and of labels, shape (rows,).
_FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], RowEffect]] = {
    "elementwise": (lambda x, labels: jnp.tanh(x) * 2.0 + 1.0, _ROWS),
    "softmax of a row": (lambda x, labels: jax.nn.softmax(x, axis=-1), _ROWS),
    "argmax": (lambda x, labels: jnp.argmax(x[:, 0], -1) == labels, _ROWS),
    "lookup": (lambda x, labels: jnp.take_along_axis(x[:, 0], labels[:, None], 1)[:, 0], _ROWS),
    "one-hot": (lambda x, labels: jax.nn.one_hot(labels, 3) * x[:, 0], _ROWS),
    "flat": (lambda x, labels: x.reshape(-1), _ROWS),
    "attention in a row": (lambda x, labels: jnp.einsum("btc,bsc->bts", x, x), _ROWS),
    "weights": (lambda x, labels: x @ jnp.ones((3, 2)), _ROWS),
    "sum of other axes": (lambda x, labels: jnp.sum(x, axis=(1, 2)), _ROWS),
    "other axes in order": (lambda x, labels: jnp.cumsum(x, axis=1)[:, ::-1], _ROWS),
    "a new leading axis": (lambda x, labels: x.reshape(1, x.shape[0], -1), _ROWS),
    "broadcast": (lambda x, labels: jnp.broadcast_to(x, (7, *x.shape)), _ROWS),
    "transpose": (lambda x, labels: x.transpose(1, 0, 2), _ROWS),
    "slice of columns": (lambda x, labels: x[:, 1:3], _ROWS),
    "padded columns": (lambda x, labels: jnp.pad(x, ((0, 0), (1, 1), (0, 0))), _ROWS),
    "largest of the last axis": (lambda x, labels: lax.top_k(x, 1)[0], _ROWS),
    "rows of a table": (lambda x, labels: jnp.arange(14.0).reshape(7, 2)[labels], _ROWS),
    "convolution": (lambda x, labels: _convolved_rows(x), _ROWS),
    "sum": (lambda x, labels: jnp.sum(x), _SUM),
    "count": (lambda x, labels: jnp.sum(jnp.ones_like(labels)), _SUM),
    "confusion": (lambda x, labels: jax.nn.one_hot(labels, 3).T @ jax.nn.one_hot(labels, 3), _SUM),
    "mean": (lambda x, labels: 0.5 * jnp.mean(x) + 1.0, _MEAN),
    "constant": (lambda x, labels: jnp.float32(0.25), RowEffect.FREE),
    "length": (lambda x, labels: jnp.float32(x.shape[0]), RowEffect.COUNT),
    "pairs": (lambda x, labels: x[:, 0] @ x[:, 0].T, _MIXED),
    "pairs in a sum": (lambda x, labels: jnp.sum(jnp.exp(x[:, 0] @ x[:, 0].T)), _MIXED),
    "root of a mean": (lambda x, labels: jnp.sqrt(jnp.mean(x)), _MIXED),
    "ratio": (lambda x, labels: jnp.sum(x) / jnp.sum(x * x), _MIXED),
    "less the mean": (lambda x, labels: x - jnp.mean(x, axis=0), _MIXED),
    "softmax over rows": (lambda x, labels: jax.nn.softmax(x, axis=0), _MIXED),
    "in order": (lambda x, labels: jnp.cumsum(x, axis=0), _MIXED),
    "numbered": (lambda x, labels: labels * jnp.arange(labels.shape[0]), _MIXED),
    "shifted": (lambda x, labels: x[1:] - x[:-1], _UNKNOWN),
    "largest": (lambda x, labels: jnp.max(x), _MIXED),
    "largest of the rows": (lambda x, labels: lax.top_k(x[:, :, 0].T, 2)[0], _UNKNOWN),
    "backward": (lambda x, labels: x[::-1], _MIXED),
    "every second row": (lambda x, labels: x[::2], _UNKNOWN),
    "padded rows": (lambda x, labels: jnp.pad(x, ((1, 0), (0, 0), (0, 0))), _UNKNOWN),
    "rows as a table": (lambda x, labels: x[labels], _UNKNOWN),
    "along the rows": (lambda x, labels: x[:, 0, :1] * jnp.ones((1, x.shape[0])), _UNKNOWN),
    "flat in another order": (lambda x, labels: x.transpose(1, 0, 2).reshape(-1), _UNKNOWN),
    "loop": (lambda x, labels: jax.lax.fori_loop(0, 2, lambda _, y: y + x, x), _UNKNOWN),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_effect_of_a_function(name: str) -> None:
    function, expected = _FUNCTIONS[name]
    x, labels = np.random.default_rng(0).normal(size=(4, 5, 3)), np.arange(4) % 3
    rows = [jnp.asarray(x, "float32"), jnp.asarray(labels, "int32")]
    effects = row_effects(lambda state, given: [function(*given)], [], rows, 4)
    assert effects is not None
    if expected is _UNKNOWN:
        assert effects[0] in (_UNKNOWN, _MIXED)
    else:
        assert effects == [expected]
    if expected is _ROWS:  # a row that changes is the only one that does
        changed = [rows[0].at[1].set(9.0), rows[1].at[1].set(2)]
        before, after = np.asarray(function(*rows)), np.asarray(function(*changed))
        axis = next(index for index, size in enumerate(before.shape) if size % 4 == 0)
        differs = np.moveaxis(before != after, axis, 0).reshape(4, -1).any(axis=1)
        assert differs[[0, 2, 3]].sum() == 0


def test_effect_on_a_state() -> None:
    state, rows = [jnp.zeros(()), jnp.zeros(()), jnp.zeros(()), jnp.zeros(())], [jnp.ones((6, 2))]

    def update(state: list[Any], rows: list[Any]) -> list[Any]:
        total, count, batches, largest = state
        (x,) = rows
        return [
            total + jnp.sum(x),
            count + x.shape[0],
            batches + 1.0,
            jnp.maximum(largest, jnp.max(x)),
        ]

    added = RowEffect.INPUT_PLUS_SUM
    effects = row_effects(update, state, rows, 6)
    assert effects is not None
    assert effects[:2] == [added, added]
    assert added not in effects[2:]


def test_state_in_another_place_and_code_for_one_size_are_no_proof() -> None:
    state, rows = [jnp.zeros(()), jnp.zeros(())], [jnp.ones((6, 2))]
    assert row_effects(lambda s, r: s[::-1], state, rows, 6) == [_UNKNOWN] * 2
    assert row_effects(lambda s, r: [r[0] + np.ones((6, 2))], [], rows, 6) is None
