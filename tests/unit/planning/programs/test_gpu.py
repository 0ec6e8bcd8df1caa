"""A training step of `fit`, compiled for eight H100: needs JAX's plugin for CUDA, and no GPU.

`make test-external NAME=gpu-compiler` runs this in an environment that has the plugin.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.planning.compilers import missing_compiler
from stratagem.planning.schedule import Schedule, share_behind
from tests.unit.planning.programs.training_steps import dense_step

pytestmark = pytest.mark.skipif(
    missing_compiler("gpu") is not None,
    reason="JAX's CUDA plugin is not installed: `make test-external NAME=gpu-compiler` has it",
)

# What XLA knows of a GPU that it compiles for: NVIDIA's figures for an H100 SXM.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
runtime_version { major: 12 minor: 8 }
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module")
def gpus() -> Topology:
    from jax.experimental import topologies

    description = topologies.get_topology_desc(
        platform="cuda", topology_name="h100", topology="1x1x8", target_config=_H100
    )
    return Topology(tuple(description.devices))


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
