"""Sums of largest elements, against NumPy."""

from __future__ import annotations

import numpy as np

from stratagem.devices.compression import TopK
from tests.unit.devices.collectives.compressed.steps import first_states, gradients, one_step


def test_largest_elements_are_those_that_numpy_finds() -> None:
    setting = TopK(fraction=0.1)
    grads = gradients(3)
    sums, states = one_step(setting, 3, grads, first_states(setting, 3))
    for got, grad, state in zip(sums, grads, states, strict=True):
        flat = grad.reshape(3, -1)
        sent = np.zeros_like(flat)
        for own, part in zip(sent, flat, strict=True):
            places = np.argsort(-np.abs(part))[: flat.shape[1] // 10]
            own[places] = part[places]
        np.testing.assert_allclose(got[0].ravel(), sent.sum(0), rtol=1e-6)
        np.testing.assert_array_equal(state["error"].reshape(3, -1), flat - sent)
