"""A training step of `fit`, compiled for eight TPU chips: needs libtpu, and no TPU.

`make test-external NAME=tpu` runs this in an environment that has libtpu.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from stratagem.devices.mesh import Topology
from tests.unit.planning.programs.absent_chips import chips_of
from tests.unit.planning.programs.schedule import Schedule, share_behind
from tests.unit.planning.programs.training_steps import dense_step

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

_REDUCTION = re.compile(r"= (.*) all-reduce(?:-start)?\(")
_SHAPE = re.compile(r"f32\[([\d,]*)\]")

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


def test_every_gradient_is_reduced_over_all_chips(chips: Topology) -> None:
    model, step = dense_step(chips, [784, 256, 128], batch_size=128)
    text = step.compile().as_text()
    reductions = [line for line in text.splitlines() if _REDUCTION.search(line)]
    assert reductions
    for line in reductions:
        groups = re.search(r"replica_groups=(\{\{0,1,2,3,4,5,6,7\}\}|\[1,8\]<=\[8\])", line)
        assert groups, line
    reduced = 0
    for line in reductions:
        for shape in _SHAPE.findall(_REDUCTION.search(line)[1]):
            reduced += int(np.prod([int(size) for size in shape.split(",") if size]))
    gradients = sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
    assert reduced >= gradients
    assert len(reductions) < len(model.trainable_variables)  # the compiler combines them


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
