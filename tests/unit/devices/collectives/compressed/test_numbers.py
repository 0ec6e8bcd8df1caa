"""Sums of shorter numbers: how close they are, and rounding by chance."""

from __future__ import annotations

import numpy as np
import pytest

from stratagem.devices.compression import BFloat16, Float8, Float16, Int8
from tests.unit.devices.collectives.compressed.steps import first_states, gradients, one_step


@pytest.mark.parametrize(
    ("setting", "bound"),
    [(BFloat16(), 0.01), (Float16(), 0.002), (Int8(), 0.03), (Float8(), 0.1)],
    ids=str,
)
def test_short_numbers_are_close(setting, bound) -> None:
    grads = gradients(2)
    sums, _ = one_step(setting, 2, grads, first_states(setting, 2))
    for got, grad in zip(sums, grads, strict=True):
        exact = grad.sum(0)
        assert np.abs(got[0] - exact).max() <= bound * np.abs(exact).max()


@pytest.mark.slow
def test_rounding_by_chance_differs_from_step_to_step_and_repeats() -> None:
    grads, states = gradients(2), first_states(Int8(), 2)
    first, again, later = (one_step(Int8(), 2, grads, states, step)[0][0] for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != later)
