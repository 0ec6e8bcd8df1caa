"""A training step of `fit`, compiled for eight TPU chips: needs libtpu, and no TPU.

`make test-external NAME=tpu` runs this in an environment that has libtpu.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from stratagem.planning.schedule import Schedule, share_behind
from tests.unit.planning.programs.absent_chips import chips_of
from tests.unit.planning.programs.training_steps import dense_step

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

# What docs/guides/many_workers.md tells users to set, and docs/design/core.md why we do not.
_OVERLAP = {
    "xla_enable_async_all_reduce": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_reduce": True,
    "xla_jf_crs_combiner_threshold_in_bytes": 4 * 2**20,
}


@pytest.fixture(scope="module")
def chips() -> Topology:
    return Topology(tuple(chips_of("v5e:2x4")))


@pytest.fixture(scope="module")
def deep_step(chips: Topology) -> Any:
    return dense_step(chips, [2048] * 5, batch_size=2048, optimizer="sgd")


def test_gradients_travel_during_the_backward_pass_where_the_compiler_is_set_to(
    deep_step: Any,
) -> None:
    model, step = deep_step
    reductions = Schedule(step.compile(compiler_options=_OVERLAP).as_text()).reductions()
    for reduction in reductions:
        print(reduction)
    gradients = sum(4 * int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert sum(reduction.num_bytes for reduction in reductions) >= gradients
    assert sum(bool(reduction.behind) for reduction in reductions) == 3
    assert share_behind(reductions) > 0.7


def test_left_alone_the_compiler_sums_all_gradients_at_the_end(deep_step: Any) -> None:
    _, step = deep_step
    reductions = Schedule(step.compile().as_text()).reductions()
    assert len(reductions) == 1
    assert share_behind(reductions) == 0
