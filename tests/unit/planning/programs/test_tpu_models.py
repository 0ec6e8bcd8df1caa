"""Training steps of `fit` compiled by the TPU's own compiler, for slices of 8, 64 and 256 chips.

Needs libtpu, and no TPU: `make test-external NAME=tpu`. What is checked is stated as arithmetic:
how many sums over replicas there are and of how many bytes, and what a chip holds.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.keras.training.model import lower_training_step
from stratagem.planning.schedule import Schedule
from stratagem.strategies.mirrored import CompileOnlyStrategy
from tests.unit.planning.programs import models
from tests.unit.planning.programs.absent_chips import QUICKLY, chips_of

pytest.importorskip("libtpu", reason="no libtpu: `make test-external NAME=tpu` has it")

# Sums travel together up to about this size.
_COMBINED_BYTES = 120 * 2**20
_MEMORY_BYTES = {"v5e": 16e9, "v6e": 32e9}


@dataclasses.dataclass
class Step:
    """A training step: the model, the shapes of its batch, and the program of a chip."""

    model: Any
    batch: Any
    compiled: Any
    num_chips: int

    @property
    def gradient_bytes(self) -> int:
        return sum(_num_bytes(variable) for variable in self.model.trainable_variables)

    @property
    def state_bytes(self) -> int:
        """Of one chip: copies of mirrored variables, and its own component of the others."""
        model = self.model
        everything = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
        return sum(map(_num_bytes, everything))

    @property
    def batch_bytes(self) -> int:
        whole = sum(math.prod(one.shape) * one.dtype.itemsize for one in self.batch)
        return whole // self.num_chips


def _num_bytes(variable: Any) -> int:
    return math.prod(variable.shape) * np.dtype(str(variable.dtype)).itemsize


@functools.cache
def compiled_step(make: Callable[[int], models.Made], topology: str) -> Step:
    devices = chips_of(topology)
    with CompileOnlyStrategy(devices).scope():
        model, batch = make(len(devices))
    compiled = lower_training_step(model, batch).compile(compiler_options=QUICKLY)
    return Step(model, batch, compiled, len(devices))


_CASES = [
    (models.digits, "v5e:2x4"),
    (models.digits, "v5e:16x16"),
    (models.resnet_50, "v5e:8x8"),
    pytest.param(models.resnet_50, "v6e:8x8", marks=pytest.mark.slow),
]


def _repeated_gradient_bytes(model: Any) -> int:
    """Gradients that are another's, so that the compiler computes and sums them once.

    Where a block of a ResNet has a convolution beside it, both sides end in a batch normalisation,
    and these are added: the gradients of the two offsets are the same.
    """
    repeated = [
        layer.beta
        for layer in model.layers
        if isinstance(layer, keras.layers.BatchNormalization) and layer.name.endswith("_0_bn")
    ]
    return sum(map(_num_bytes, repeated))


@pytest.mark.parametrize(("make", "topology"), _CASES)
def test_gradients_are_summed_over_all_chips_and_nothing_else_is(make, topology) -> None:
    """Of a step of `fit`: metrics and statistics stay on their chip until somebody asks."""
    step = compiled_step(make, topology)
    text = step.compiled.as_text()
    reductions = Schedule(text).reductions()
    summed = sum(reduction.num_bytes for reduction in reductions)
    assert summed == step.gradient_bytes - _repeated_gradient_bytes(step.model)
    assert len(reductions) == math.ceil(summed / _COMBINED_BYTES)
    assert len(step.model.trainable_variables) > 3 * len(reductions)
    count = step.num_chips
    everybody = ",".join(map(str, range(count)))
    for line in text.splitlines():
        if re.search(r" all-reduce(-start)?\(", line):
            groups = re.search(r"replica_groups=(\{\{[\d,]*\}\}|\[[\d,]*\]<=\[\d*\])", line)
            assert groups is not None, line
            assert groups[1] in (
                f"{{{{{everybody}}}}}",
                f"[1,{step.num_chips}]<=[{step.num_chips}]",
            )


@pytest.mark.parametrize(("make", "topology"), _CASES)
def test_chip_holds_its_copy_and_its_part_of_the_batch(make, topology) -> None:
    step = compiled_step(make, topology)
    memory = step.compiled.memory_analysis()
    expected = step.state_bytes + step.batch_bytes
    # Arrays are stored in tiles of 8 x 128: those of the digits have 64 channels or fewer.
    most = 2.0 if isinstance(step.model, keras.Sequential) else 1.1
    assert 1.0 <= memory.argument_size_in_bytes / expected < most
    # The state is written where it was read from: only the token of a step is new.
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 2**14
    total = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    total += memory.generated_code_size_in_bytes
    assert total < _MEMORY_BYTES[topology.partition(":")[0]]


def test_many_steps_are_a_loop_in_one_program() -> None:
    with CompileOnlyStrategy(chips_of("v5e:2x4")).scope():
        model, batch = models.digits(8)
    lowered = lower_training_step(model, batch, num_steps=16)
    text = lowered.compile(compiler_options=QUICKLY).as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1  # in the body of the loop
    bodies = re.findall(r" while\(.*body=%([\w.-]+)", text)
    computations = re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", text)
    (summing,) = [one for one in computations if re.search(r" all-reduce(?:-start)?\(", one)]
    assert summing.split(" ", 1)[0].removeprefix("%") in bodies
