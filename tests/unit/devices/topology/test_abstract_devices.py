"""Abstract devices: strategies and arrays on them."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib._jax as library
import keras
import numpy as np
import pytest
from jax._src import compilation_cache, compiler
from jax.sharding import PartitionSpec

import stratagem as sg
from stratagem.devices import lockstep
from stratagem.devices.finding import (
    AbstractTopology,
    find_devices,
    local_devices,
    placeholder,
    planned_devices,
    planned_topology,
    planning_for,
)
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.devices.private import enable_compilation_cache, gloo_bound_to
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from stratagem.planning.targets import parse_target
from tests.fresh_process import run_fresh
from tests.unit.group.process_group.members import joined

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
        assert {(d.device_kind, d.process_index) for d in local_devices()} == {
            ("NVIDIA H100 80GB HBM3", 0)
        }
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


@pytest.mark.compatibility
@pytest.mark.parametrize("shard_state", [None, "all"])
def test_absent_devices_take_no_memory_and_give_zeros(shard_state) -> None:
    with planning_for(_EIGHT, shard_state):
        strategy = sg.MirroredStrategy()
    before = sum(array.nbytes for array in jax.live_arrays())
    with strategy.scope():
        layer = keras.layers.Embedding(10**8, 64)
        layer.build((None,))
    assert layer.count_params() == 64 * 10**8
    rows, total = strategy.run(lambda x: (x + 1, layer(x).sum()), args=(np.zeros(4, "int32"),))
    assert (rows.stacked.shape, total.stacked.shape) == ((8, 4), (8,))
    assert not rows.stacked.any()
    assert not total.stacked.any()
    assert sum(array.nbytes for array in jax.live_arrays()) - before < 10**6


# Devices by name, by index and as objects; virtual CPU devices; rejected specs.


def test_devices_keep_their_order_whatever_they_are_given_as(monkeypatch) -> None:
    names = ["/cpu:6", "device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:5", "cpu"]
    devices = find_devices([jax.devices()[3], "cpu:4", 2, 7, *names])
    assert [device.id for device in devices] == [3, 4, 2, 7, 6, 1, 5, 0]
    assert [device.id for device in local_devices()] == list(range(8))
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(ValueError, match=r"contains .*cpu:0.* belongs to another process"):
        find_devices([jax.devices()[0]])


_KNOWN = ", ".join(f"cpu:{index}" for index in range(8))
_WAY = re.escape('jax.config.update("jax_num_cpu_devices", 9)')


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        ([], ValueError, r"devices=\[\] is empty"),
        (["cpu:1", "/device:CPU:1"], ValueError, r"cpu:1 more than once(?s:.)*remove the dupl"),
        (["cpu:0", "cpu:1", 1], ValueError, r"cpu:1 more than once(?s:.)*remove the duplicates"),
        *(
            ([spec], ValueError, f"does not exist(?s:.)*one of {_KNOWN}")
            for spec in ("gpu:0", "tpu:3", "cuda:0", 8, -1)
        ),
        (["cpu:8"], ValueError, f"cpu:8 does not exist(?s:.)*JAX has started(?s:.)*{_WAY}"),
        *(
            (
                ["cpu:0", name],
                ValueError,
                r"is not a device name(?s:.)*a platform \(cpu, gpu, tpu\)",
            )
            for name in ("", "cpu:", "cpu:x", "cpu:-1", "cpu:1\n", "cpu 1", "xpu:0", "0")
        ),
        *(
            ([spec], TypeError, "is of type (?s:.)*an index, or a jax.Device")
            for spec in (None, 1.0, True, ["cpu:0"])
        ),
        *(
            ([name], ValueError, f"{name}, which belongs to another process")
            for name in (
                "/job:worker/device:CPU:0",
                "/job:localhost/task:1/cpu:0",
                "/replica:1/cpu:0",
            )
        ),
    ],
)
def test_other_devices_are_refused(specs, error, words) -> None:
    with pytest.raises(error, match=words):
        find_devices(specs)
    if specs[-1:] == ["xpu:0"]:
        with planning_for(_EIGHT), pytest.raises(ValueError, match=words):  # for absent ones, too
            find_devices(specs)


REPORT = """
import os, jax
from stratagem.devices.finding import find_devices
def report(specs):
    try:
        print([device.id for device in find_devices(specs)])
    except ValueError as error:
        print(str(error).replace("\\n", " "))
"""
STATE = "print(len(jax.devices('cpu')), os.environ.get('NPROC'))"


def test_virtual_cpu_devices_are_made_with_threads_for_them() -> None:
    """A misspelt name before does not start JAX, so that the right one still works."""
    program = f"{REPORT}report(['cpu:0', 'cpuu:1'])\nreport(['cpu:0', 'cpu:2'])\n{STATE}"
    refused, *made = run_fresh(program, NPROC=None, XLA_FLAGS=None)
    assert "'cpuu:1' is not a device name" in refused
    assert made == ["[0, 2]", "3 12"]


def test_virtual_cpu_devices_cannot_be_made_after_jax_has_started() -> None:
    program = f"{REPORT}jax.devices()\nreport(['cpu:0', 'cpu:1'])\n{STATE}"
    refused, state = run_fresh(program, NPROC=None, XLA_FLAGS=None)
    assert "device cpu:1 does not exist." in refused
    assert 'jax.config.update("jax_num_cpu_devices", 2)' in refused
    assert state == "1 None"


@pytest.mark.slow
@pytest.mark.parametrize(("highest", "num_devices"), [(1, 4), (5, 6)])
def test_virtual_cpu_devices_that_xla_flags_ask_for_are_never_made_fewer(
    highest, num_devices
) -> None:
    program = f"{REPORT}report(['cpu:{highest}'])\n{STATE}"
    flags = "--xla_force_host_platform_device_count=4"
    lines = run_fresh(program, XLA_FLAGS=flags, NPROC="3")
    assert lines == [f"[{highest}]", f"{num_devices} 3"]


# Topology: mesh, shardings, and transfer of arrays.


@pytest.fixture
def three() -> Topology:
    """Replicas on the devices 2, 0 and 1, so that replica order is not JAX's order."""
    return Topology(find_devices(["cpu:2", "cpu:0", "cpu:1"]))


def by_device(array: jax.Array) -> dict[int, np.ndarray]:
    return {shard.device.id: np.asarray(shard.data) for shard in array.addressable_shards}


def test_mesh_has_the_devices_in_replica_order_on_one_axis(three) -> None:
    assert three.num_replicas == 3
    assert three.mesh.axis_names == (REPLICA_AXIS,)
    assert [device.id for device in three.mesh.devices] == [2, 0, 1]
    default = Topology(None)
    assert (default.num_replicas, list(default.mesh.devices)) == (1, jax.local_devices()[:1])
    array = default.replicate(np.float32(2.5))
    assert (float(array), array.devices()) == (2.5, {jax.local_devices()[0]})
    values = [jax.device_put(np.float32(index), jax.devices()[index]) for index in range(3)]
    np.testing.assert_array_equal(default.stack(values), [0, 1, 2])
    with pytest.raises(TypeError, match=r"is of type list(?s:.)*a tuple of jax.Device, or None"):
        Topology(jax.devices())
    with pytest.raises(ValueError, match=r"devices=\(\) is empty"):
        Topology(())


def test_shardings_say_on_which_axis_the_replicas_are(three) -> None:
    specs = [three.replicated.spec, three.stacked.spec, three.stacked_steps.spec]
    assert specs == [
        PartitionSpec(),
        PartitionSpec(REPLICA_AXIS),
        PartitionSpec(None, REPLICA_AXIS),
    ]
    steps = jax.device_put(np.arange(6).reshape(2, 3), three.stacked_steps)
    columns = {device: part[:, 0].tolist() for device, part in by_device(steps).items()}
    assert columns == {2: [0, 3], 0: [1, 4], 1: [2, 5]}


@pytest.mark.parametrize("value", [1.5, np.arange(4, dtype=np.int32), np.zeros((0, 2), bool)])
def test_replicate_puts_a_whole_copy_on_every_device(three, value) -> None:
    copies = by_device(three.replicate(value))
    assert set(copies) == {0, 1, 2}
    for copy in copies.values():
        np.testing.assert_array_equal(copy, value)


def test_stack_takes_random_keys(three) -> None:
    keys = [jax.random.key(index) for index in range(3)]
    stacked = three.stack(keys)
    for key, part in zip(keys, stacked, strict=True):
        np.testing.assert_array_equal(jax.random.key_data(part), jax.random.key_data(key))


@pytest.mark.parametrize("is_default", [True, False])
def test_stack_joins_known_components_while_something_else_is_traced(three, is_default) -> None:
    topology = Topology(None) if is_default else three
    kept = []

    @jax.jit
    def traced(x):
        kept.append(topology.stack([np.float32(1), 2.0, np.float32(3)]))
        return kept[0].sum() + topology.stack([x, 2 * x, np.float32(0)])

    np.testing.assert_array_equal(traced(np.float32(3.0)), [9, 12, 6])
    np.testing.assert_array_equal(kept[0], [1, 2, 3])


@pytest.mark.parametrize("count", [0, 2, 4])
def test_stack_of_another_number_of_components_is_refused(three, count) -> None:
    with pytest.raises(ValueError, match=f"Received {count} values for 3 replicas"):
        three.stack([np.float32(0.0)] * count)


def test_replicas_with_several_copies_of_state_are_on_two_axes() -> None:
    devices = tuple(jax.devices()[:6])
    topology = Topology(devices).with_shard_size(3)
    assert topology.mesh.shape == {"replica": 2, "shard": 3}
    assert topology.replica_axis == topology.replica_axes == ("replica", "shard")
    assert (topology.shard_axis, topology.num_shards, topology.num_replicas) == ("shard", 3, 6)
    assert [*topology.mesh.devices.flat] == [*devices]
    stacked = topology.put_stacked(np.arange(6))
    assert [int(one.data[0]) for one in stacked.addressable_shards] == [*range(6)]
    pairs = Topology.of_groups([devices[:2], devices[2:4], devices[4:]]).with_shard_size(1)
    assert pairs.mesh.shape == {"replica": 3, "shard": 1, "logical": 2}


def test_one_copy_of_state_needs_no_second_axis(three) -> None:
    assert three.with_shard_size(3) == three.with_shard_size(None) == three
    assert (three.replica_axis, three.shard_axis, three.num_shards) == ("replica", "replica", 3)
    with pytest.raises(ValueError, match=r"shard_size=2 was given for 3 replicas.\n.*\[1, 3\]"):
        three.with_shard_size(2)


# Patches of libraries while a backend starts, and their removal.


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has scheduling policies")
def test_gloo_gets_an_address_and_its_thread_takes_no_core_from_others(monkeypatch) -> None:
    made: list[Any] = []

    def make(*args: Any, **kwargs: Any) -> None:
        policy = lambda: made.append((args, kwargs, os.sched_getscheduler(0)))  # noqa: E731
        thread = threading.Thread(target=policy)
        thread.start()
        thread.join()

    monkeypatch.setattr(library, "make_gloo_tcp_collectives", make)
    with gloo_bound_to("192.0.2.7"):
        library.make_gloo_tcp_collectives("client")
    assert made == [(("client",), {"hostname": "192.0.2.7"}, os.SCHED_BATCH)]
    assert library.make_gloo_tcp_collectives is make
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    monkeypatch.delattr(library, "make_gloo_tcp_collectives")
    with gloo_bound_to("192.0.2.7"):  # backends start as before where JAX has no such function
        assert not hasattr(library, "make_gloo_tcp_collectives")


def test_every_process_caches_programs_without_callbacks(monkeypatch) -> None:
    written: list[Any] = []

    def put(*args: Any) -> None:
        written.append(args)
        if args[0] == "full":
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(compiler, "_cache_write", lambda *args: written.append(("asked", *args)))
    monkeypatch.setattr(compilation_cache, "put_executable_and_time", put)
    enable_compilation_cache()
    compiler._cache_write("key", 1.5, "module", "backend", "program", [])
    compiler._cache_write("key", 1.5, "module", "backend", "program")  # of newer releases
    asked = ("asked", "key", 1.5, "module", "backend", "program")
    own = ("key", "module", "program", "backend", 1)
    assert written == [(*asked, []), own, asked, own]
    written.clear()
    compiler._cache_write("key", 1.5, "module", "backend", "program", ["callback"])
    assert written == [(*asked, ["callback"])]
    compiler._cache_write("full", 1.5, "module", "backend", "program", [])  # is no error
    monkeypatch.delattr(compiler, "_cache_write")
    enable_compilation_cache()  # where JAX has no such function
    assert not hasattr(compiler, "_cache_write")


# Status that a program reports while it waits for other processes.


@pytest.fixture
def group(monkeypatch) -> Iterator[Group]:
    (member,) = joined(1, GroupLimits(join_s=120))
    monkeypatch.setattr(lockstep, "current_group", lambda: member)
    yield member
    member.abandon()


def test_error_that_comes_with_the_data_of_a_broken_group_is_reported_to_the_program(group) -> None:
    with pytest.raises(OSError, match="disk"), lockstep.waiting_for_input("a dataset"):
        raise OSError("disk")
    assert not group.is_reported, "the group is whole"
    group.report_error("a bug")
    group.wait_for_verdict()
    with pytest.raises(StopIteration), lockstep.waiting_for_input("a dataset"):
        raise StopIteration
    assert group.is_reported


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt(), ValueError("a bug")])
def test_program_that_was_not_started_does_not_count(group, error) -> None:
    """Other processes that wait in it learn that this process has left: it is a step behind."""

    def start():
        assert group.num_steps == 1
        raise error

    with pytest.raises(type(error)):
        lockstep.run_together("train", start, platform="cpu")
    assert group.num_steps == 0
    assert lockstep.run_together("train", lambda: (7, ()), platform="cpu") == 7
    assert group.num_steps == 1
