"""Steps with variables in pinned memory of the host, compiled for TPUs: what is where, and travels.

Needs libtpu, and no TPU: `make test-external NAME=tpu` has it.
"""

from __future__ import annotations

import functools
import re
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.finding import planning_for
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.lockstep import program_of
from stratagem.keras.training.planned_models import training_step
from stratagem.planning.memory import step_programs
from stratagem.planning.schedule import Schedule
from stratagem.planning.targets import parse_target
from tests.unit.planning.programs.absent_chips import QUICKLY, chips_of

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

NUM_CHIPS, WIDTH, NUM_LAYERS, NUM_STEPS = 8, 1024, 4, 5
KERNEL_BYTES = 4 * WIDTH * WIDTH
# Kernels and what Adam keeps of them: on the host there is one copy for all chips.
PINNED_BYTES = 3 * NUM_LAYERS * KERNEL_BYTES // NUM_CHIPS


def _model() -> keras.Model:
    layers = [keras.layers.Dense(WIDTH, "relu", use_bias=False) for _ in range(NUM_LAYERS)]
    model = keras.Sequential([keras.Input((WIDTH,)), *layers])
    model.compile("adam", "mse")
    return model


@functools.cache
def _compiled(num_steps: int) -> Any:
    chips = Topology(tuple(chips_of("v5e:2x4")))
    with planning_for(parse_target("v5e:2x4").topology):
        strategy = sg.CentralStorageStrategy(parameter_device="pinned_host")
    with strategy.scope():
        model = _model()
    batch = (np.broadcast_to(np.float32(1), (64 * NUM_CHIPS, WIDTH)),) * 2
    with training_step(model, batch, strategy) as step, step_programs(step, chips) as programs:
        (one,) = programs
        assert sum(shape.size * 4 for shape in one.brought) == 3 * NUM_LAYERS * KERNEL_BYTES
        program = program_of(step.retrace(step.arguments, chips), chips, "step")
        function, shapes = program.step.with_shapes(step.arguments, num_steps)
        return function.lower(*shapes).compile(compiler_options=QUICKLY)


@pytest.mark.parametrize("num_steps", [1, NUM_STEPS])
def test_chips_have_room_for_a_step_and_the_host_has_one_copy_of_the_state(num_steps) -> None:
    compiled = _compiled(num_steps)
    memory = compiled.memory_analysis()
    print(memory)
    assert memory.host_argument_size_in_bytes == PINNED_BYTES
    assert memory.host_output_size_in_bytes == PINNED_BYTES
    assert memory.host_alias_size_in_bytes == PINNED_BYTES  # the old values' memory
    # Were the parts gathered before they are brought over, the host would hold the whole.
    assert memory.host_temp_size_in_bytes == 0
    batch_bytes = 2 * num_steps * 64 * WIDTH * 4
    assert memory.argument_size_in_bytes < batch_bytes + 2**17
    assert memory.temp_size_in_bytes < 3 * NUM_LAYERS * KERNEL_BYTES


def test_parts_are_gathered_by_chips_and_gradients_summed_in_parts() -> None:
    text = _compiled(1).as_text()
    large = [one for one in Schedule(text).reductions() if one.num_bytes >= KERNEL_BYTES // 8]
    kinds = [one.kind for one in large for _ in range(one.times)]
    assert kinds.count("reduce-scatter") == NUM_LAYERS
    # libtpu 0.0.42.1 gathers two of the four again for the backward pass.
    assert NUM_LAYERS <= kinds.count("all-gather") < 2 * NUM_LAYERS
    assert {*kinds} == {"reduce-scatter", "all-gather"}
    assert "host-call" not in text
    # Each chip brings its own parts: nothing of the size of a whole kernel leaves the host.
    brought = re.findall(r"copy-start\(%param[\w.]*\)", text)
    assert len(brought) >= 3 * NUM_LAYERS
