"""A training step for two slices of TPUs, compiled by their own compiler: needs libtpu, and no TPU.

The program that comes out is that of one slice. What goes to the other one leaves it by a pair of
`send` and `recv`, which the runtime of the slices' hosts (Megascale) sums.
"""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest

from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.device_assignment import in_ring_order, tpu_topology_of
from stratagem.keras.training.model import lower_training_step
from stratagem.strategies.cross_device_ops import AutomaticOps
from stratagem.strategies.mirrored import CompileOnlyStrategy
from tests.unit.planning.programs import models
from tests.unit.planning.programs.absent_chips import QUICKLY, chips_of

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

_NUM_SLICES, _CHIPS = 2, 8
_SLICE = "0,1,2,3,4,5,6,7"
_REDUCTION = re.compile(
    r'"stablehlo\.(all_reduce|reduce_scatter|all_gather)".*?replica_groups = dense<(.*?)>',
    re.DOTALL,
)
_SENT = re.compile(r" = \(f32\[([\d,]*)\].*? send\(.*_xla_megascale_target=\"(.*?)\"")
_INSIDE = re.compile(
    r" (all-reduce|reduce-scatter|all-gather)(?:-start)?\(.*replica_groups=\{\{([\d,]*)\}\}"
)


def _step(options: CommunicationOptions | None = None) -> tuple[Any, Any]:
    chips = chips_of("v5e:2x4", num_slices=_NUM_SLICES)
    with CompileOnlyStrategy(chips, AutomaticOps(options)).scope():
        model, batch = models.digits(len(chips))
    return model, lower_training_step(model, batch)


def _sent_elements(text: str) -> int:
    sent = _SENT.findall(text)
    assert sent
    for _, target in sent:
        assert target == "{1,2}x{0:7}"  # between the slices, each chip with its counterpart
    return sum(math.prod(int(size) for size in shape.split(",")) for shape, _ in sent)


@pytest.fixture(scope="module")
def step() -> tuple[Any, Any]:
    return _step()


def test_large_gradients_go_in_three_stages(step) -> None:
    model, lowered = step
    slices = [list(range(8)), list(range(8, 16))]
    pairs = [list(pair) for pair in zip(*slices, strict=True)]
    stages = _REDUCTION.findall(lowered.as_text())
    large = [one for one in model.trainable_variables if 4 * math.prod(one.shape) > 4096]
    small = [one for one in model.trainable_variables if 4 * math.prod(one.shape) <= 4096]
    assert (len(large), len(small)) == (3, 5)
    for stage, groups in (
        ("reduce_scatter", slices),
        ("all_reduce", pairs),
        ("all_gather", slices),
    ):
        assert stages.count((stage, str(groups))) == len(large)
    whole = ("all_reduce", str([list(range(16))]))
    assert stages.count(whole) == len(small)
    assert len(stages) == 3 * len(large) + len(small)


def test_an_eighth_of_the_gradients_leaves_a_chip_for_the_other_slice(step) -> None:
    model, lowered = step
    text = lowered.compile(compiler_options=QUICKLY).as_text()
    gradients = sum(math.prod(one.shape) for one in model.trainable_variables)
    sent = _sent_elements(text)
    print(f"{sent} numbers of {gradients} are sent")
    # Small ones are sent whole, and in rows of 128.
    assert 1.0 <= sent / (gradients / _CHIPS) < 1.25
    inside = _INSIDE.findall(text)
    assert {groups for _, groups in inside} == {_SLICE}
    # A reduce-scatter may be written as an all-reduce of which each chip takes its part.
    assert {kind for kind, _ in inside} >= {"all-gather"}
    assert {kind for kind, _ in inside} & {"reduce-scatter", "all-reduce"}


def test_left_alone_the_compiler_sends_no_less(step) -> None:
    """Also in stages, with libtpu 0.0.42: what is gained is that it does not depend on that."""
    nccl = CommunicationOptions(implementation=CommunicationImplementation.NCCL)
    _, lowered = _step(nccl)
    own = _sent_elements(lowered.compile(compiler_options=QUICKLY).as_text())
    ours = _sent_elements(step[1].compile(compiler_options=QUICKLY).as_text())
    print(f"{own} numbers left alone, {ours} in stages")
    assert ours < 1.25 * own


def test_chips_of_all_slices_have_a_place_of_their_own() -> None:
    chips = chips_of("v5e:2x4", num_slices=_NUM_SLICES)
    topology = tpu_topology_of(chips)
    assert topology.mesh_shape.tolist() == [2, 4, 2, 1]
    assert topology.missing_devices.size == 0
    assert (topology.num_tasks, topology.num_tpus_per_task) == (4, 4)


@pytest.mark.parametrize("name", ["v5e:2x4", "v5e:16x16", "v6e:4x4", "v4:2x2x2"])
def test_chips_of_a_host_stand_in_a_ring(name) -> None:
    ring = in_ring_order(chips_of(name))
    assert [chip.process_index for chip in ring] == sorted(chip.process_index for chip in ring)
    for one, other in itertools.pairwise(ring):
        if one.process_index == other.process_index:
            steps = sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
            assert steps <= 1  # 0: two cores of a chip
