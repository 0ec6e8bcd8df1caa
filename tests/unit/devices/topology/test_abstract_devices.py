"""Abstract devices: strategies and arrays on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.abstract_devices import (
    AbstractDevice,
    AbstractTopology,
    placeholder,
    planned_devices,
    planned_topology,
    planning_for,
)
from stratagem.devices.finding import find_devices, find_groups, local_devices
from stratagem.devices.mesh import Topology
from stratagem.planning.targets import parse_target

_EIGHT = parse_target("8xH100").topology


@pytest.mark.compatibility
def test_large_array_takes_no_memory() -> None:
    large = placeholder((10**6, 10**6), "float64")
    assert (large.shape, large.dtype) == ((10**6, 10**6), np.float32)  # as JAX would have it
    assert large.base is not None
    assert large.strides == (0, 0)


def test_small_arrays_keep_their_values_and_large_ones_their_shapes() -> None:
    small = _EIGHT.replicate(jnp.arange(3))
    np.testing.assert_array_equal(small, [0, 1, 2])
    large = _EIGHT.put_stacked(np.ones((8, 4096, 16), "float64"))
    assert (large.shape, large.dtype) == ((8, 4096, 16), np.float32)
    assert not large.any()
    stacked = _EIGHT.stack([jnp.full(2, index) for index in range(8)])
    np.testing.assert_array_equal(stacked[:, 0], range(8))
    assert _EIGHT.stack([placeholder((4096, 16), "float32")] * 8).shape == (8, 4096, 16)


def test_an_absent_topology_is_one_process() -> None:
    pod = parse_target("2xv5e:16x16").topology
    assert pod.num_replicas == pod.num_local_replicas == 512
    assert not pod.spans_processes
    assert (pod.platform, pod.is_abstract) == ("tpu", True)
    assert pod.mesh.shape == {"replica": 512}
    assert not Topology(tuple(jax.devices()[:2])).is_abstract


@pytest.mark.compatibility
def test_strategies_have_the_devices_that_are_planned_for() -> None:
    with planning_for(_EIGHT):
        assert local_devices() == _EIGHT.devices
        assert sg.MirroredStrategy().num_replicas_in_sync == 8
        assert sg.MirroredStrategy(["gpu:0", "gpu:1"]).num_replicas_in_sync == 8
        assert sg.MultiWorkerMirroredStrategy().num_replicas_in_sync == 8
        assert sg.OneDeviceStrategy("gpu:0").num_replicas_in_sync == 1
        strategy = sg.MirroredStrategy()
        assert isinstance(strategy.topology, AbstractTopology)
    with planning_for(parse_target("2xv5e:4x4").topology):
        assert sg.TPUStrategy().num_replicas_in_sync == 32
    assert planned_devices() is None
    here = Topology(find_devices(["cpu:0", "cpu:1"]))
    assert planned_topology(here) is here
    assert not sg.MirroredStrategy(["cpu:0", "cpu:1"]).topology.is_abstract


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            lambda: sg.ParameterServerStrategy(num_workers=1, num_servers=1), id="servers"
        ),
        pytest.param(lambda: sg.CentralStorageStrategy(["gpu:0"]), id="on the only accelerator"),
        pytest.param(lambda: sg.CentralStorageStrategy(None, "gpu:1"), id="on an accelerator"),
    ],
)
def test_parameter_servers_are_not_planned(make) -> None:
    with planning_for(_EIGHT), pytest.raises(ValueError, match="cannot be planned"):
        make()


@pytest.mark.parametrize(
    ("make", "num_replicas", "size"),
    [
        pytest.param(
            lambda: sg.MirroredStrategy([["gpu:0", "gpu:1"], ["gpu:2", "gpu:3"]]),
            8,
            2,
            marks=pytest.mark.compatibility,
        ),
        (lambda: sg.MirroredStrategy([["gpu:0", "gpu:1", "gpu:2", "gpu:3"]]), 1, 4),
        (lambda: sg.MirroredStrategy([["gpu:0"], ["gpu:1"]]), 16, 1),
        (lambda: sg.MultiWorkerMirroredStrategy(devices_per_replica=4), 4, 4),
    ],
)
def test_groups_of_devices_become_as_many_as_there_is_room_for(make, num_replicas, size) -> None:
    with planning_for(parse_target("16xH100").topology):
        topology = make().topology
    assert (topology.num_replicas, topology.num_logical_devices) == (num_replicas, size)
    assert topology.is_abstract
    assert topology.mesh.size == num_replicas * size
    assert topology.mesh.axis_names == ("replica", *topology.logical_axes)
    for replica_id in range(num_replicas):
        hosts = {device.process_index for device in topology.devices_of(replica_id)}
        assert len(hosts) == 1


@pytest.mark.parametrize("groups", [[[0, 1, 2], [3, 4, 5]], [list(range(9))]])
def test_groups_that_a_host_has_no_room_for(groups) -> None:
    with planning_for(_EIGHT), pytest.raises(ValueError, match="do not fit on hosts of 8"):
        sg.MirroredStrategy(groups)


def test_names_are_checked_for_absent_devices_too() -> None:
    with planning_for(_EIGHT):
        for names in (["disk:0"], [["disk:0"], ["disk:1"]]):
            with pytest.raises(ValueError, match="is not a device name"):
                find_groups(names) if isinstance(names[0], list) else find_devices(names)


@pytest.mark.compatibility
@pytest.mark.parametrize("shard_state", ["optimizer", "all"])
def test_state_is_shared_out_as_it_is_asked_for(shard_state) -> None:
    with planning_for(_EIGHT):
        own = sg.MirroredStrategy(shard_state=shard_state)
    with planning_for(_EIGHT, shard_state):
        asked = sg.MirroredStrategy()
    for strategy in (own, asked):
        with strategy.scope():
            layer = keras.layers.Dense(64)
            layer.build((None, 128))
            optimizer = keras.optimizers.Adam()
            optimizer.build(layer.trainable_variables)
        slots = [one for one in optimizer.variables if one.shape == (128, 64)]
        assert len(slots) == 2
        assert all(slot.store is not None for slot in slots)
        assert (layer.kernel.store is not None) == (shard_state == "all")
        assert layer.bias.store is None
        assert layer.kernel.for_step.shape == (128, 64)


def test_a_step_before_the_one_that_trains_gives_zeros_of_a_shared_table() -> None:
    with planning_for(_EIGHT, "all"):
        strategy = sg.MirroredStrategy()
    with strategy.scope():
        table = keras.layers.Embedding(2**16, 8)
        table.build(None)
    result = strategy.run(lambda ids: table(ids).sum(), args=(np.zeros(4, "int32"),))
    np.testing.assert_array_equal(result.stacked, np.zeros(8))


def test_variables_of_absent_devices_take_no_memory() -> None:
    with planning_for(_EIGHT):
        strategy = sg.MirroredStrategy()
    before = sum(array.nbytes for array in jax.live_arrays())
    with strategy.scope():
        layer = keras.layers.Embedding(10**8, 64)
        layer.build((None,))
    after = sum(array.nbytes for array in jax.live_arrays())
    assert layer.count_params() == 64 * 10**8
    assert after - before < 10**6


@pytest.mark.compatibility
def test_results_on_absent_devices_are_zeros() -> None:
    with planning_for(_EIGHT):
        strategy = sg.MirroredStrategy()
    parts = strategy.run(lambda x: (x + 1, x.sum()), args=(np.ones(3, "float32"),))
    assert [part.stacked.shape for part in parts] == [(8, 3), (8,)]
    assert not parts[0].stacked.any()


def test_abstract_device_has_attributes_of_a_device() -> None:
    device = AbstractDevice(3, "tpu", "TPU v4")
    assert str(device) == "tpu:3"
    assert (device.process_index, device.slice_index) == (0, 0)
