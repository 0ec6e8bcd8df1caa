"""Strategies of local devices: which they take and refuse, and the order of their replicas."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import keras
import pytest

import stratagem as sg
from stratagem.strategies.local_update import islands_of
from stratagem.strategies.membership import local_topology
from stratagem.strategies.mirrored import CompileOnlyStrategy

# Devices that MirroredStrategy takes and refuses, and the order of its replicas.


def test_mirrored_takes_every_local_device_when_none_is_named() -> None:
    strategy = sg.MirroredStrategy()
    assert strategy.topology.devices == tuple(jax.local_devices())
    assert strategy.num_replicas_in_sync == jax.local_device_count()
    assert strategy.cluster_resolver is None


@pytest.mark.parametrize(
    "devices",
    [
        ["cpu:1", "cpu:3"],
        ("/cpu:1", "/device:CPU:3"),
        ["CPU:1", "/job:localhost/replica:0/task:0/device:CPU:3"],
        [1, 3],
        [jax.devices()[1], "cpu:3"],
    ],
    ids=str,
)
def test_mirrored_takes_devices_by_name_index_or_as_they_are(devices) -> None:
    strategy = sg.MirroredStrategy(devices)
    assert strategy.topology.devices == (jax.devices()[1], jax.devices()[3])
    assert strategy.num_replicas_in_sync == 2
    assert repr(strategy) == "MirroredStrategy(cpu:1, cpu:3)"


def test_replicas_are_in_the_order_of_the_devices() -> None:
    strategy = sg.MirroredStrategy(["cpu:5", "cpu:2"])
    value = strategy.run(lambda: sg.get_replica_context().replica_id_in_sync_group)
    assert [int(part) for part in strategy.local_results(value)] == [0, 1]
    devices = [part.devices() for part in strategy.local_results(value)]
    assert devices == [{jax.devices()[5]}, {jax.devices()[2]}]


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ValueError, r"devices=\[\] is empty"),
        (["cpu:0", 0], ValueError, "more than once"),
        (["cpu:99"], ValueError, r"(?s)device cpu:99 does not exist.*jax_num_cpu_devices"),
        (["nonsense"], ValueError, "'nonsense' is not a device name"),
        ([None], TypeError, "device=None is of type NoneType"),
    ],
    ids=str,
)
def test_mirrored_refuses_what_names_no_devices(devices, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.MirroredStrategy(devices)


def test_mirrored_refuses_cross_device_ops_of_another_type() -> None:
    with pytest.raises(TypeError, match=r"cross_device_ops='nccl' is of type str"):
        sg.MirroredStrategy(["cpu:0"], cross_device_ops="nccl")
    assert sg.MirroredStrategy(["cpu:0"], None).num_replicas_in_sync == 1


def test_sharded_state_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="shard_state='weights' was given"):
        sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="weights")
    with pytest.raises(ValueError, match="shard_state='all' and a layout_map and a placement were"):
        sg.MultiWorkerMirroredStrategy(
            shard_state="all",
            layout_map={"kernel": (None, "logical")},
            placement={"kernel": "sharded"},
        )


# Local devices of a strategy, one or several per replica.

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


# Devices that OneDeviceStrategy takes and refuses, and the place of its variables.


@pytest.mark.parametrize("device", ["cpu:3", "/cpu:3", 3, jax.devices()[3]], ids=repr)
def test_one_device_takes_a_device(device) -> None:
    strategy = sg.OneDeviceStrategy(device)
    assert strategy.topology.devices == (jax.devices()[3],)
    assert strategy.extended.worker_devices == (jax.devices()[3],)
    assert repr(strategy) == "OneDeviceStrategy(cpu:3)"


@pytest.mark.parametrize(
    ("device", "error", "words"),
    [
        ("cpu:99", ValueError, "cpu:99 does not exist"),
        (None, TypeError, "device=None is of type NoneType"),
        (["cpu:0"], TypeError, r"device=\['cpu:0'\] is of type list"),
    ],
    ids=str,
)
def test_one_device_refuses_what_names_no_device(device, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.OneDeviceStrategy(device)


def test_variables_and_results_of_one_device_lie_on_it() -> None:
    strategy = sg.OneDeviceStrategy("cpu:3")
    with strategy.scope():
        variable = sg.Variable(1.0)
    assert variable.value.devices() == {jax.devices()[3]}
    assert strategy.run(lambda: variable + 1.0).devices() == {jax.devices()[3]}


# Strategies of devices that are not here.


def test_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run was called on the 2 devices"):
        CompileOnlyStrategy(jax.devices()[:2]).run(lambda: 1)


# `LocalUpdateStrategy`: its arguments, and the sizes of its islands.


def test_method_is_local_sgd_by_default() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    assert strategy.local_updates == sg.local_updates.LocalSGD()
    assert strategy.num_replicas_in_sync == 2
    assert sg.LocalUpdateStrategy().cluster_resolver.task_type is None
    with pytest.raises(TypeError, match="method='diloco' is of type str"):
        sg.LocalUpdateStrategy("diloco")


def test_devices_and_a_cluster_are_refused() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec({"worker": ["127.0.0.1:1234"]})
    )
    with pytest.raises(ValueError, match="a cluster resolver were given"):
        sg.LocalUpdateStrategy(devices=["cpu:0"], cluster_resolver=resolver)


# Islands of a topology: sizes that fit, and those that are refused.


def topology(*of_processes, groups=None) -> Any:
    """Stands in for a topology of processes with numbers of devices."""
    devices = tuple(
        SimpleNamespace(process_index=place)
        for place, count in enumerate(of_processes)
        for _ in range(count)
    )
    return SimpleNamespace(num_replicas=len(devices), devices=devices, groups=groups)


@pytest.mark.parametrize(
    ("of_processes", "given", "size"),
    [
        ((4, 4), 1, 1),
        ((4, 4), 2, 2),
        ((4, 4), 4, 4),
        ((4, 4), 8, 8),
        ((4, 4), "process", 4),
        ((1, 1, 1, 1), "process", 1),
        ((1, 1, 1, 1), 2, 2),
        ((8,), "process", 8),
        ((4, 2), 2, 2),
    ],
)
def test_size_of_islands(of_processes, given, size) -> None:
    islands = islands_of(topology(*of_processes), given)
    assert (islands.num_replicas, islands.size) == (sum(of_processes), size)


_UNEVEN = 'pass "process" to train in lockstep'


@pytest.mark.parametrize(
    ("of_processes", "given", "error", "message"),
    [
        *[((4, 4), given, ValueError, _UNEVEN) for given in (0, -2, 3, 16)],
        *[((4, 4), given, TypeError, 'or "process"') for given in (2.0, True, None, "machine")],
        ((3, 3), 2, ValueError, "lockstep is for the fast links"),  # parts of processes
        ((4, 2), "process", ValueError, "or pass replicas_per_island=1"),
    ],
)
def test_other_sizes_of_islands_are_refused(of_processes, given, error, message) -> None:
    with pytest.raises(error, match=message):
        islands_of(topology(*of_processes), given)
    with pytest.raises(ValueError, match="pass a flat list of devices"):
        islands_of(topology(4, groups=((),)), 2)


def test_strategy_has_islands() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    strategy = sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2)
    assert (strategy.num_islands, strategy.num_replicas_in_sync) == (2, 4)
    assert sg.LocalUpdateStrategy(devices=devices).num_islands == 4
    alone = sg.LocalUpdateStrategy(devices=devices, replicas_per_island="process")
    assert (alone.num_islands, alone.islands) == (1, None)
