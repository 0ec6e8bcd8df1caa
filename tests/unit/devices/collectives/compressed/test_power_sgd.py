"""Low-rank sums, against the paper's algorithm in NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.devices.compression import PowerSGD
from tests.unit.devices.collectives.compressed.steps import first_states, gradients, one_step


def test_low_rank_is_that_of_the_paper() -> None:
    """Algorithm 1 in float64, with another way to orthogonalize."""
    setting = PowerSGD(rank=2)
    grads, states = gradients(3), first_states(setting, 3)
    sums, new_states = one_step(setting, 3, grads, states)
    for got, grad, state, new in zip(sums, grads, states, new_states, strict=True):
        matrices = grad.reshape(3, -1, grad.shape[-1]).astype(np.float64)
        product = sum(matrix @ state["factor"][0] for matrix in matrices)
        basis = np.linalg.svd(product, full_matrices=False)[0]
        expected = basis @ sum(matrix.T @ basis for matrix in matrices).T
        np.testing.assert_allclose(got[0].reshape(expected.shape), expected, atol=2e-5)
        own = matrices[1] - basis @ (matrices[1].T @ basis).T
        np.testing.assert_allclose(new["error"][1].reshape(own.shape), own, atol=2e-5)
        np.testing.assert_array_equal(new["factor"], [new["factor"][0]] * 3)


@pytest.mark.slow
def test_factors_of_repeated_gradients_become_the_best_ones() -> None:
    """Power iteration with a warm start finds the singular vectors, which SVD finds at once."""
    setting = PowerSGD(rank=2, error_feedback=False)
    grads, states = gradients(2), first_states(setting, 2)
    for _ in range(60):
        sums, states = one_step(setting, 2, grads, states)
    whole = grads[0].sum(0)
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    np.testing.assert_allclose(sums[0][0], best, atol=0.02 * values[0])
