"""Shapes of a step's arguments with their shardings."""

from __future__ import annotations

import jax
import numpy as np

from stratagem.devices.mesh import Topology
from stratagem.execution.programs.ids_program import StepProgram, shape_on


def test_shape_has_the_leading_axes_and_the_sharding() -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    shape = shape_on(np.zeros((3, 4), np.int8), topology.stacked, (2,))
    assert (shape.shape, shape.dtype, shape.sharding) == ((2, 3, 4), np.int8, topology.stacked)
    alone = shape_on(np.zeros((), np.float32), topology.replicated)
    assert (alone.shape, alone.sharding) == ((), topology.replicated)


def test_program_is_lowered_for_its_shapes() -> None:
    topology = Topology(tuple(jax.devices()[:2]))
    shape = shape_on(np.zeros(4, np.float32), topology.stacked, (2,))
    program = StepProgram("double", jax.jit(lambda x: x * 2), (shape,), ())
    assert (program.num_donated, program.is_of_replicas, program.brought) == (0, True, ())
    lowered = program.function.lower(*program.shapes)
    assert lowered.out_info.shape == (2, 4)
