"""Effects that are read off a function's operations, beside what they must be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.execution.analysis.row_effects import RowEffect, row_effects

_ROWS, _SUM, _MEAN = RowEffect.ROWS, RowEffect.SUM, RowEffect.MEAN
_MIXED, _UNKNOWN = RowEffect.MIXED, RowEffect.UNKNOWN

# Functions of x, shape (rows, 5, 3), and of labels, shape (rows,).
_FUNCTIONS: dict[str, tuple[Callable[[Any, Any], Any], RowEffect]] = {
    "elementwise": (lambda x, labels: jnp.tanh(x) * 2.0 + 1.0, _ROWS),
    "softmax of a row": (lambda x, labels: jax.nn.softmax(x, axis=-1), _ROWS),
    "argmax": (lambda x, labels: jnp.argmax(x[:, 0], -1) == labels, _ROWS),
    "lookup": (
        lambda x, labels: jnp.take_along_axis(x[:, 0], labels[:, None], 1)[:, 0],
        _ROWS,
    ),
    "one-hot": (lambda x, labels: jax.nn.one_hot(labels, 3) * x[:, 0], _ROWS),
    "flat": (lambda x, labels: x.reshape(-1), _ROWS),
    "attention in a row": (lambda x, labels: jnp.einsum("btc,bsc->bts", x, x), _ROWS),
    "weights": (lambda x, labels: x @ jnp.ones((3, 2)), _ROWS),
    "sum": (lambda x, labels: jnp.sum(x), _SUM),
    "count": (lambda x, labels: jnp.sum(jnp.ones_like(labels)), _SUM),
    "confusion": (
        lambda x, labels: jax.nn.one_hot(labels, 3).T @ jax.nn.one_hot(labels, 3),
        _SUM,
    ),
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
    "flat in another order": (lambda x, labels: x.transpose(1, 0, 2).reshape(-1), _UNKNOWN),
    "loop": (lambda x, labels: jax.lax.fori_loop(0, 2, lambda _, y: y + x, x), _UNKNOWN),
}


@pytest.mark.parametrize("name", _FUNCTIONS)
def test_effect_of_a_function(name: str) -> None:
    function, expected = _FUNCTIONS[name]
    rows = [jnp.ones((4, 5, 3)), jnp.zeros((4,), "int32")]
    effects = row_effects(lambda state, given: [function(*given)], [], rows, 4)
    assert effects is not None
    if expected is _UNKNOWN:
        assert effects[0] in (_UNKNOWN, _MIXED)
    else:
        assert effects == [expected]


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
