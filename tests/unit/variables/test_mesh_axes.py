"""Axes of Keras's meshes in terms of replicas and the devices of a replica."""

from __future__ import annotations

import keras
import pytest

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import Topology
from stratagem.variables.layouts import axis_names, devices_per_replica_of, groups_of_mesh


def replicas(count: int, size: int) -> Topology:
    names = [[f"cpu:{i * size + j}" for j in range(size)] for i in range(count)]
    return Topology.of_groups(find_groups(names))


def layout_map(shape, names) -> keras.distribution.LayoutMap:
    count = 1
    for size in shape:
        count *= size
    mesh = keras.distribution.DeviceMesh(shape, names, [f"cpu:{i}" for i in range(count)])
    return keras.distribution.LayoutMap(mesh)


@pytest.mark.parametrize(
    ("shape", "names", "topology", "expected"),
    [
        ((2, 2), ["batch", "model"], (2, 2), {"batch": ("replica",), "model": ("logical",)}),
        ((2, 2), ["x", "y"], (2, 2), {"x": ("replica",), "y": ("logical",)}),
        ((4, 2), ["model", "data"], (2, 4), {"data": ("replica",), "model": (0, 1)}),
        ((1, 2, 4), ["a", "b", "c"], (1, 8), {"a": ("replica",), "b": (0,), "c": (1, 2)}),
        ((8, 1), ["batch", "model"], (8, 1), {"batch": ("replica",), "model": ()}),
        ((8,), ["x"], (8, 1), {"x": ("replica",)}),
        ((2,), ["x"], (2, 2), {"x": ("logical",)}),
        ((4, 2), ["batch", "model"], (2, 4), {"batch": ("replica",)}),  # other groups were given
        ((1, 2, 3), ["a", "b", "c"], (1, 6), {"a": ("replica",), "b": (0,), "c": (1,)}),
        ((1, 3, 2), ["a", "b", "c"], (1, 6), {"a": ("replica",)}),
    ],
)
def test_names_of_a_mesh(shape, names, topology, expected) -> None:
    own = replicas(*topology)
    wanted = {
        name: tuple(f"logical_{axis}" if isinstance(axis, int) else axis for axis in axes)
        for name, axes in expected.items()
    }
    assert axis_names(layout_map(shape, names), own) == wanted


def test_names_without_a_mesh() -> None:
    own = {"replica": ("replica",), "logical": ("logical_0", "logical_1")}
    assert axis_names({}, replicas(2, 4)) == own
    assert axis_names(keras.distribution.LayoutMap(None), replicas(2, 4)) == own
    assert axis_names(layout_map((2, 4), ["batch", "logical"]), replicas(2, 4)) == own


def test_groups_of_a_mesh() -> None:
    by_batch = layout_map((2, 2), ["batch", "model"])
    assert groups_of_mesh(by_batch) == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]
    by_model = layout_map((2, 2), ["model", "batch"])
    assert groups_of_mesh(by_model) == [["cpu:0", "cpu:2"], ["cpu:1", "cpu:3"]]
    assert groups_of_mesh(layout_map((2,), ["x"])) == [["cpu:0"], ["cpu:1"]]
    assert groups_of_mesh({}) is None
    assert groups_of_mesh(None) is None
    assert devices_per_replica_of(layout_map((2, 1, 2), ["batch", "a", "b"])) == 2
    assert devices_per_replica_of({}) == 1
