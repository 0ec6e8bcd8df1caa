"""A training step of `fit`, compiled for eight H100: needs JAX's plugin for CUDA, and no GPU.

`make test-external NAME=gpu-compiler` runs this in an environment that has the plugin.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.planning.compilers import devices_of, missing_compiler
from stratagem.planning.schedule import Schedule, share_behind
from stratagem.planning.targets import parse_target
from tests.unit.planning.programs.training_steps import dense_step

pytestmark = pytest.mark.skipif(
    missing_compiler("gpu") is not None,
    reason="JAX's CUDA plugin is not installed: `make test-external NAME=gpu-compiler` has it",
)


@pytest.fixture(scope="module")
def gpus() -> Topology:
    return Topology(devices_of(parse_target("8xH100")))


@pytest.fixture(scope="module")
def deep_step(gpus: Topology) -> Any:
    return dense_step(gpus, [2048] * 5, batch_size=2048, optimizer="sgd")


def test_gradients_travel_during_the_backward_pass(deep_step: Any) -> None:
    model, step = deep_step
    reductions = Schedule(step.compile().as_text()).reductions()
    for reduction in reductions:
        print(reduction)
    gradients = sum(4 * int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert sum(reduction.num_bytes for reduction in reductions) >= gradients
    assert share_behind(reductions) > 0.7


def test_one_message_of_all_gradients_hides_nothing(deep_step: Any) -> None:
    _, step = deep_step
    options = {"xla_gpu_all_reduce_combine_threshold_bytes": 2**30}
    reductions = Schedule(step.compile(compiler_options=options).as_text()).reductions()
    assert len(reductions) == 1
    assert share_behind(reductions) == 0


def test_a_loop_over_steps_of_one_gpu_keeps_the_order_of_least_memory(gpus: Topology) -> None:
    one = Topology((gpus.devices or ())[:1])
    _, steps = dense_step(one, [2048] * 5, batch_size=2048, num_steps=4)
    asynchronous = re.findall(r"\S+-start\(", steps.compile().as_text())
    assert not asynchronous  # one would have XLA reorder all operations of the loop
