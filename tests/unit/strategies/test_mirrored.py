"""Devices that MirroredStrategy takes and refuses, and the order of its replicas."""

from __future__ import annotations

import jax
import pytest

import stratagem as sg


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


def test_one_name_alone_is_one_device() -> None:
    assert sg.MirroredStrategy("cpu:4").topology.devices == (jax.devices()[4],)


@pytest.mark.parametrize(
    ("devices", "error", "words"),
    [
        ([], ValueError, r"devices=\[\] is empty"),
        (["cpu:0", "cpu:0"], ValueError, "more than once"),
        (["cpu:0", 0], ValueError, "more than once"),
        (["cpu:99"], ValueError, r"(?s)device cpu:99 does not exist.*jax_num_cpu_devices"),
        (["gpu:0"], ValueError, r"(?s)device gpu:0 does not exist\.\nExpected one of cpu:0"),
        ([8], ValueError, "device number 8 does not exist"),
        ([-1], ValueError, "device number -1 does not exist"),
        (["nonsense"], ValueError, "'nonsense' is not a device name"),
        (["cpu:x"], ValueError, "'cpu:x' is not a device name"),
        ([None], TypeError, "device None is of type NoneType"),
        ([1.0], TypeError, r"device 1\.0 is of type float"),
        ([True], TypeError, "device True is of type bool"),
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
