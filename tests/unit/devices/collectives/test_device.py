"""Concatenation over a mesh axis, with its gradient, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.collectives import device
from tests.unit.devices.collectives.replicas import AXIS, on_replicas


@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_concatenates_in_replica_order(axis) -> None:
    parts = np.arange(18, dtype=np.int32).reshape(3, 2, 3)
    result = on_replicas(lambda part: device.all_gather(part, axis, AXIS, None), parts)
    for gathered in result:
        np.testing.assert_array_equal(gathered, np.concatenate(list(parts), axis=axis))


@pytest.mark.parametrize("lengths", [(2, 1, 0), (0, 0, 2), (2, 2, 2), (0, 0, 0)])
def test_all_gather_leaves_padding_out(lengths) -> None:
    parts = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    result = on_replicas(lambda part: device.all_gather(part, 0, AXIS, lengths), parts)
    true = np.concatenate([part[:length] for part, length in zip(parts, lengths, strict=True)])
    for gathered in result:
        np.testing.assert_array_equal(gathered, true)


def test_gradient_of_all_gather_is_the_sum_of_the_slices_of_the_own_part() -> None:
    """Replica r weighs row k of the gathered rows by 10 r + k."""
    lengths = (2, 1, 2)
    weights = 10.0 * np.arange(3)[:, None] + np.arange(5)[None, :]

    def gradient(part, weight):
        def loss(part):
            return jnp.vdot(device.all_gather(part, 0, AXIS, lengths), weight)

        return jax.grad(loss)(part)

    result = on_replicas(gradient, np.ones((3, 2), np.float32), weights.astype(np.float32))
    columns = weights.sum(0)  # 30, 33, 36, 39, 42
    np.testing.assert_allclose(result, [columns[:2], [columns[2], 0.0], columns[3:]], rtol=1e-6)
