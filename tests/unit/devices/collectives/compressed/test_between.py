"""Compressed sums between islands: equal everywhere, and nothing is lost."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.islands import Islands
from stratagem.devices.compression import BFloat16, Float8, Int8, PowerSGD, TopK
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.compressed.between import IslandSums, compressed_between
from tests.unit.devices.collectives.axes import on_axis
from tests.unit.devices.collectives.compressed.steps import first_states, gradients

ALL = [BFloat16(), Int8(), Int8(error_feedback=False), Float8(), PowerSGD(rank=2), TopK()]


@pytest.mark.parametrize(
    ("setting", "count", "size"),
    [
        (BFloat16(), 4, 2),
        *(
            pytest.param(setting, count, size, marks=pytest.mark.slow)
            for setting in ALL
            for count, size in [(4, 2), (6, 3), (2, 1)]
            if (setting, count) != (BFloat16(), 4)
        ),
    ],
    ids=str,
)
def test_sums_and_errors_of_islands_add_up(setting, count, size) -> None:
    axis, islands = ReplicaAxis("row", count), Islands(count, size)

    def replica(step):
        def body(arrays, states):
            communicator = MeshCommunicator(ChosenAllReduce(axis))
            sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))
            return compressed_between(setting, arrays, states, sums, step=step)

        return body

    states = first_states(setting, count)
    for step in range(2):
        arrays = gradients(islands.count, step)
        own = [np.repeat(one, size, 0) for one in arrays]
        sums, news = on_axis(axis, replica(step), own, states)
        for got, array, state, new in zip(sums, arrays, states, news, strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
            if "factor" in new:
                whole = np.broadcast_to(new["factor"][0], new["factor"].shape)
                np.testing.assert_array_equal(new["factor"], whole)
            if not setting.error_feedback:
                np.testing.assert_allclose(got[0], array.sum(0), atol=0.1)
                continue
            # The errors of all replicas add up to what no island has sent.
            given = array.astype(np.float64).sum(0) + state["error"].sum(0)
            np.testing.assert_allclose(got[0] + new["error"].sum(0), given, rtol=0, atol=3e-5)
            for island in range(islands.count):
                parts = new["error"][island * size : (island + 1) * size]
                np.testing.assert_array_equal(parts, np.stack([parts[0]] * size))
                assert np.abs(parts).max() > 0
        states = news
