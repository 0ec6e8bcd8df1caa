"""Meshes of Keras while a script is planned for devices that do not exist."""

from __future__ import annotations

import keras
import pytest

import stratagem as sg
from stratagem.devices.abstract_devices import planning_for
from stratagem.planning.targets import parse_target

_HERE = keras.distribution.list_devices()


def test_mesh_has_the_devices_of_the_plan() -> None:
    with planning_for(parse_target("8xH100").topology):
        names = [f"gpu:{index}" for index in range(8)]
        assert keras.distribution.list_devices() == names
        assert keras.distribution.list_devices("GPU") == names
        assert keras.distribution.list_devices("cpu") == _HERE
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        assert mesh.devices.tolist() == [names[:4], names[4:]]
        given = keras.distribution.DeviceMesh((2,), ("batch",), devices=["gpu:1", "gpu:0"])
        assert given.devices.tolist() == ["gpu:1", "gpu:0"]
        with pytest.raises(ValueError, match="does not match the number of devices"):
            keras.distribution.DeviceMesh((3, 3), ("batch", "model"))


def test_mesh_of_a_layout_map_groups_the_devices_of_the_plan() -> None:
    with planning_for(parse_target("8xH100").topology):
        mesh = keras.distribution.DeviceMesh((2, 4), ("batch", "model"))
        layout_map = keras.distribution.LayoutMap(mesh)
        layout_map[".*kernel"] = (None, "model")
        topology = sg.MirroredStrategy(layout_map=layout_map, shard_state="all").topology
    assert (topology.num_replicas, topology.num_logical_devices) == (2, 4)


def test_other_programs_see_the_devices_of_this_machine() -> None:
    assert keras.distribution.list_devices() == _HERE
    mesh = keras.distribution.DeviceMesh((len(_HERE),), ("batch",))
    assert mesh.devices.tolist() == _HERE
