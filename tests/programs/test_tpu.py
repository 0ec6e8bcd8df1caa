"""A training step of `fit`, compiled for eight TPU chips: needs libtpu, and no TPU.

`make test-tpu` runs this in an environment that has libtpu.
"""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.execution import batch_arguments
from stratagem.input.batches import place, take_batch
from stratagem.keras.replica_steps import ReplicaSteps
from stratagem.topology import Topology
from tests.parity.comparison import mirrored

pytest.importorskip("libtpu", reason="libtpu is not installed: `make test-tpu` has it")

_REDUCTION = re.compile(r"= (.*) all-reduce(?:-start)?\(")
_SHAPE = re.compile(r"f32\[([\d,]*)\]")


@pytest.fixture(scope="module")
def chips() -> Topology:
    from jax.experimental import topologies

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TPU_SKIP_MDS_QUERY", "1")  # nobody to ask which TPU this is
        description = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    return Topology(tuple(description.devices))


def _program(chips: Topology) -> tuple[Any, str]:
    strategy = mirrored(8)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((784,)),
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(128, activation="relu"),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    batch = take_batch(
        (np.ones((128, 784), "float32"), np.zeros(128, "int32")), strategy.num_replicas_in_sync
    )
    model.train_on_batch(*[np.asarray(array) for array in batch.arrays])  # builds the metrics
    arguments = batch_arguments(place([batch], strategy.topology))
    lowered = strategy.compiled.lower(ReplicaSteps(model).train, arguments, chips)
    return model, lowered.compile().as_text()


def test_every_gradient_is_reduced_over_all_chips(chips: Topology) -> None:
    model, text = _program(chips)
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
