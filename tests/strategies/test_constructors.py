"""What strategies are made from, and what their constructors refuse."""

from __future__ import annotations

import copy

import jax
import pytest

import stratagem as sg
from stratagem.strategies.base.default import DefaultStrategy
from stratagem.strategies.base.strategy import Strategy
from stratagem.topology import Topology, find_devices


def test_mirrored_takes_every_local_device_when_none_is_named() -> None:
    strategy = sg.MirroredStrategy()
    assert strategy.topology.devices == tuple(jax.local_devices())
    assert strategy.num_replicas_in_sync == 8
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
        ("tpu:0", ValueError, "tpu:0 does not exist"),
        ("", ValueError, "is not a device name"),
        (None, TypeError, "device None is of type NoneType"),
        (["cpu:0"], TypeError, r"device \['cpu:0'\] is of type list"),
    ],
    ids=str,
)
def test_one_device_refuses_what_names_no_device(device, error, words) -> None:
    with pytest.raises(error, match=words):
        sg.OneDeviceStrategy(device)


def test_one_device_needs_a_device() -> None:
    with pytest.raises(TypeError, match="device"):
        sg.OneDeviceStrategy()


def test_variables_and_results_of_one_device_lie_on_it() -> None:
    strategy = sg.OneDeviceStrategy("cpu:3")
    with strategy.scope():
        variable = sg.Variable(1.0)
    assert variable.value.devices() == {jax.devices()[3]}
    assert strategy.run(lambda: variable + 1.0).devices() == {jax.devices()[3]}


def test_there_is_one_default_strategy_and_it_is_no_strategy_of_devices() -> None:
    default = sg.get_strategy()
    assert isinstance(default, DefaultStrategy)
    assert sg.get_strategy() is default
    assert default.topology.devices is None
    assert repr(default) == "DefaultStrategy()"


def test_strategy_is_made_from_a_topology() -> None:
    with pytest.raises(TypeError, match=r"topology=\['cpu:0'\] is of type list"):
        Strategy(["cpu:0"])
    assert Strategy(Topology((jax.devices()[1],))).num_replicas_in_sync == 1


def test_long_and_short_names_are_the_same() -> None:
    assert Strategy.experimental_local_results is Strategy.local_results
    assert (
        Strategy.experimental_distribute_values_from_function
        is Strategy.distribute_values_from_function
    )
    assert Strategy.concat is Strategy.gather


def test_a_deep_copy_keeps_what_a_subclass_added() -> None:
    class Named(sg.Strategy):
        def __init__(self) -> None:
            super().__init__(Topology(find_devices(["cpu:0"])))
            self.spare, self.notes = jax.devices("cpu")[1], ["first"]

    strategy = Named()
    copied = copy.deepcopy(strategy)
    assert copied.spare is strategy.spare
    assert copied.notes == ["first"]
    assert copied.notes is not strategy.notes
    assert copied.variables is not strategy.variables
