"""Pooled rows, beside sums of Python and gradients of differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.parameter_server.embedding.layer import COMBINERS, pooled

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(5, 4, 3))
WEIGHTS = RNG.uniform(0.5, 2, size=(5, 4))
# From all rows to none.
MASK = np.arange(4) < np.array([4, 3, 2, 1, 0])[:, None]


def by_hand(rows: np.ndarray, mask: np.ndarray, weights: np.ndarray, combiner: str) -> np.ndarray:
    result = np.zeros((len(rows), rows.shape[-1]))
    for number in range(len(rows)):
        own = [(weights[number, k], rows[number, k]) for k in range(4) if mask[number, k]]
        total = sum((weight * row for weight, row in own), np.zeros(rows.shape[-1]))
        divisor = {
            "sum": 1.0,
            "mean": sum(weight for weight, _ in own),
            "sqrtn": sum(weight**2 for weight, _ in own) ** 0.5,
        }[combiner]
        result[number] = total / divisor if own else total
    return result


@pytest.mark.parametrize("combiner", COMBINERS)
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_every_combiner(combiner, is_masked, is_weighted) -> None:
    mask = MASK if is_masked else np.ones_like(MASK)
    weights = WEIGHTS if is_weighted else np.ones_like(WEIGHTS)
    found = pooled(
        jnp.asarray(ROWS),
        jnp.asarray(MASK) if is_masked else None,
        WEIGHTS if is_weighted else None,
        combiner,
    )
    np.testing.assert_allclose(found, by_hand(ROWS, mask, weights, combiner), 1e-5, 1e-6)


@pytest.mark.parametrize("combiner", COMBINERS)
def test_gradients_are_those_of_small_differences(combiner) -> None:
    def total(rows: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(pooled(rows, jnp.asarray(MASK), weights, combiner)))

    def by_differences(place: int, size: float = 1e-5) -> np.ndarray:
        given = [ROWS, WEIGHTS]
        found = np.zeros(given[place].shape)
        for index in np.ndindex(*found.shape):
            sides = []
            for sign in (1, -1):
                moved = [one.copy() for one in given]
                moved[place][index] += sign * size
                sides.append(np.sin(by_hand(moved[0], MASK, moved[1], combiner)).sum())
            found[index] = (sides[0] - sides[1]) / (2 * size)
        return found

    found = jax.grad(total, (0, 1))(jnp.asarray(ROWS), jnp.asarray(WEIGHTS))
    for place, one in enumerate(found):
        np.testing.assert_allclose(one, by_differences(place), rtol=1e-3, atol=1e-5)


def test_weights_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Weights of shape \(5,\) were given for keys of shape"):
        pooled(jnp.asarray(ROWS), None, np.ones(5), "sum")
