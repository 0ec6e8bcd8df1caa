"""Local devices of a strategy, one or several per replica."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.strategies.local_topology import local_topology

FOUR = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def sizes(strategy: sg.Strategy) -> tuple[int, int]:
    return strategy.topology.num_replicas, strategy.topology.num_logical_devices


def test_devices_are_grouped_by_number() -> None:
    topology = local_topology(FOUR, name="devices", devices_per_replica=2)
    assert str(topology) == "[cpu:0, cpu:1], [cpu:2, cpu:3]"
    assert local_topology(None, name="devices", devices_per_replica=4).num_replicas == 2
    assert local_topology(FOUR, name="devices", devices_per_replica=1).groups is None


def test_both_groupings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\[\['cpu:0', .* and devices_per_replica=2 were"):
        sg.MirroredStrategy([["cpu:0", "cpu:1"]], devices_per_replica=2)
    with pytest.raises(ValueError, match="devices_per_replica=3 does not divide the 4"):
        sg.MirroredStrategy(FOUR, devices_per_replica=3)


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((2, 4), ["batch", "model"], (2, 4)),
        ((4, 2), ["model", "batch"], (2, 4)),
        ((8,), ["x"], (8, 1)),
        ((2, 2, 2), ["data", "x", "y"], (2, 4)),
    ],
)
def test_mesh_of_keras_is_the_mesh_of_a_strategy(monkeypatch, shape, names, expected) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    devices = [f"cpu:{index}" for index in range(8)]
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, names, devices))
    strategies = [
        sg.MirroredStrategy(layout_map=layouts),
        sg.MultiWorkerMirroredStrategy(layout_map=layouts),
        sg.TPUStrategy(layout_map=layouts),
    ]
    assert [sizes(one) for one in strategies] == [expected] * 3
    assert sizes(sg.MirroredStrategy(devices, layout_map={})) == (8, 1)
    assert sizes(sg.MirroredStrategy(layout_map=layouts, devices_per_replica=8)) == (1, 8)
