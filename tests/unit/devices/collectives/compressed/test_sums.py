"""Sums of every scheme: equal on all replicas, and nothing is lost that feedback should keep."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.devices.compression import BFloat16, Float8, Float16, Int8, PowerSGD, TopK
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.compressed.sums import compressed_sums
from tests.unit.devices.collectives.compressed.steps import first_states, gradients, one_step

ALL = [BFloat16(), Float16(), Int8(), Int8(stochastic=False), Float8(), PowerSGD(rank=2), TopK()]


def _marked(quick: object) -> list[object]:
    """All of them, of which one is quick."""
    return [pytest.param(one, marks=() if one == quick else pytest.mark.slow) for one in ALL]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("setting", _marked(BFloat16()), ids=str)
def test_sums_and_errors_add_up_to_the_gradients(setting, count) -> None:
    """What a step does not send is in the errors, so that in the end all of it is sent."""
    states = first_states(setting, count)
    for step in range(3):
        grads = gradients(count, step)
        sums, new_states = one_step(setting, count, grads, states, step)
        for got, grad, state, new in zip(sums, grads, states, new_states, strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
            given = (grad + state["error"]).astype(np.float64).sum(0)
            np.testing.assert_allclose(got[0] + new["error"].sum(0), given, rtol=0, atol=2e-5)
            assert np.abs(new["error"]).max() > 0
        states = new_states


@pytest.mark.parametrize("setting", _marked(Float16()), ids=str)
def test_dtype_of_gradients_is_kept(setting) -> None:
    grads = [jnp.ones((40, 30), jnp.bfloat16)]
    state = {name: jnp.ones(size) for name, size in setting.state_shapes((40, 30)).items()}
    sums, _ = compressed_sums(setting, grads, [state], SoleCommunicator(), replica_id=0, step=0)
    assert sums[0].dtype == jnp.bfloat16
