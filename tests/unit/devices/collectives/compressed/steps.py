"""Gradients of some shapes, and a compressed step on several devices."""

from __future__ import annotations

import jax
import numpy as np

from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.compressed.sums import compressed_sums
from tests.unit.devices.collectives.axes import AXES, on_axis

SHAPES = [(40, 30), (3, 3, 5, 7), (17, 64)]


def gradients(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, *shape)).astype(np.float32) for shape in SHAPES]


def first_states(setting, count):
    rng = np.random.default_rng(1)
    states = []
    for shape in SHAPES:
        state = {
            name: np.zeros((count, *size), np.float32)
            for name, size in setting.state_shapes(shape).items()
        }
        if "factor" in state:
            factor = rng.normal(size=state["factor"].shape[1:]).astype(np.float32)
            state["factor"] = np.broadcast_to(factor, state["factor"].shape)
        states.append(state)
    return states


def one_step(setting, count, grads, states, step=0):
    axis = AXES[count]
    communicator = MeshCommunicator(ChosenAllReduce(axis))

    def replica(grads, states):
        return compressed_sums(
            setting,
            grads,
            states,
            communicator,
            replica_id=jax.lax.axis_index(axis.name),
            step=step,
        )

    return on_axis(axis, replica, grads, states)
