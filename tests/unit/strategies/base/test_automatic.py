"""Sums over replicas of several slices: only one stage crosses the slow network."""

from __future__ import annotations

import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.collectives import axis
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.measurement import SIZES_BYTES, MeasuredChoice
from stratagem.devices.collectives.packing import SizedPacks
from stratagem.devices.communication import CommunicationImplementation, CommunicationOptions
from stratagem.devices.mesh import Topology
from stratagem.keras.training.model import lower_training_step
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.compile_only import CompileOnlyStrategy
from tests.parity.comparison import (
    Scope,
    carried_out,
    classification,
    differences,
    fitted,
    plain_keras,
    small_classifier,
)
from tests.unit.devices.topology.test_tpu_coordinates import chips

_REDUCTION = re.compile(
    r'"stablehlo\.(\w+)".*?replica_groups = dense<(.*?)>.*?\}\) : \(tensor<(.*?)xf32>', re.DOTALL
)


def topology_of(num_slices: int) -> Topology:
    return Topology(
        tuple(chip for n in range(num_slices) for chip in chips(2, 2, rows_a_host=1, slice_index=n))
    )


def test_sums_between_slices_go_in_stages_without_being_measured() -> None:
    choice = AutomaticOps().all_reduce(topology_of(2)).choice
    assert choice.algorithm(2**20) is Algorithm.HIERARCHICAL
    assert choice.algorithm(4) is Algorithm.COMPILER
    assert AutomaticOps().all_reduce(topology_of(1)).choice.algorithm(2**20) is Algorithm.COMPILER
    options = CommunicationOptions(implementation=CommunicationImplementation.RING)
    assert (
        AutomaticOps(options).all_reduce(topology_of(2)).choice.algorithm(2**20) is Algorithm.RING
    )


def test_two_stages_can_be_asked_for() -> None:
    options = CommunicationOptions(implementation="two_stage")
    choice = AutomaticOps(options).all_reduce(topology_of(1)).choice
    assert choice.algorithm(4) is choice.algorithm(2**30) is Algorithm.TWO_STAGE


def test_measured_times_choose_the_packs(monkeypatch) -> None:
    monkeypatch.setattr(Topology, "spans_processes", True)
    topology = Topology(tuple(jax.devices()[:2]))
    for latency_s, expected in [(1e-4, 2**18), (0.1, 2**24)]:
        times_s = {size: latency_s + 8e-9 * size for size in SIZES_BYTES}
        measured = MeasuredChoice(Choice(), {Algorithm.COMPILER: times_s}, "measured")
        packing = AutomaticOps(measured=measured).all_reduce(topology).packing
        assert packing == SizedPacks(expected, expected)


@pytest.fixture
def two_slices(monkeypatch) -> None:
    """CPU devices with even numbers form one slice, the others another."""
    monkeypatch.setattr(axis, "num_slices", lambda _: 2)
    monkeypatch.setattr(axis, "slice_of", lambda device: device.id % 2)


def _trained(scope: Scope) -> dict[str, Any]:
    x, y = classification(16)
    with scope():
        model = small_classifier()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, x, y, batch_size=8)


@pytest.mark.usefixtures("two_slices")
def test_training_on_two_slices_is_that_of_one_device() -> None:
    strategy = sg.MirroredStrategy(jax.devices()[:4], sg.HierarchicalCopyAllReduce(num_packs=0))
    groups = strategy.cross_device_ops.all_reduce(strategy.topology).axis.groups
    assert groups == ((0, 2), (1, 3))
    assert not differences(carried_out(_trained, strategy.scope), plain_keras(_trained))


@pytest.mark.usefixtures("two_slices")
def test_only_a_part_of_each_gradient_leaves_its_slice() -> None:
    ops = sg.HierarchicalCopyAllReduce(num_packs=0)
    with CompileOnlyStrategy(jax.devices()[:8], ops).scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, use_bias=False)])
        model.compile("sgd", "mse")
    batch = [jax.ShapeDtypeStruct((8, size), "float32") for size in (64, 32)]
    text = lower_training_step(model, batch).as_text()
    inside = np.array([[0, 2, 4, 6], [1, 3, 5, 7]])
    found = re.findall(
        r'"stablehlo\.(\w+)".*?replica_groups = dense<(.*?)>.*?\}\) : \(tensor<(.*?)xf32>',
        text,
        re.DOTALL,
    )
    assert found == [
        ("reduce_scatter", str(inside.tolist()), "4x512"),
        ("all_reduce", str(inside.T.tolist()), "512"),
    ]
    gathered = re.search(r'"stablehlo\.all_gather".*?replica_groups = dense<(.*?)>', text)
    assert gathered is not None
    assert gathered[1] == str(inside.tolist())
