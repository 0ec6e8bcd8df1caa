"""The strategy of TPUs on CPU devices that stand for chips; programs/test_tpu.py has real ones."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.cluster.processes import Processes
from stratagem.strategies import tpu as tpu_system
from stratagem.strategies.membership import identity_of
from tests.parity.comparison import (
    Scope,
    carried_out,
    classification,
    differences,
    fitted,
    plain_keras,
    small_classifier,
)

NUM_DEVICES = 8


@pytest.fixture(autouse=True)
def cpu_devices_stand_for_chips(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "cpu")
    monkeypatch.delenv("TF_CONFIG", raising=False)


def assigned(num_replicas: int, **arguments: Any) -> sg.tpu.experimental.DeviceAssignment:
    topology = sg.tpu.experimental.initialize_tpu_system()
    return sg.tpu.experimental.DeviceAssignment.build(
        topology, num_replicas=num_replicas, **arguments
    )


def compiled(**arguments: Any) -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **arguments)
    return model


def test_a_replica_on_each_chip_in_a_ring() -> None:
    strategy = sg.TPUStrategy()
    assert strategy.num_replicas_in_sync == NUM_DEVICES
    assert [device.id for device in strategy.topology.devices] == [0, 1, 3, 5, 7, 6, 4, 2]
    assert isinstance(strategy.cluster_resolver, sg.cluster_resolver.TPUClusterResolver)
    assert strategy.cluster_resolver.cluster_spec().jobs == []
    assert strategy.executor.steps_per_call is None
    topology = sg.tpu.initialize_tpu_system()
    assert topology.mesh_shape.tolist() == [2, 4, 1, 1]
    assert (topology.num_tasks, topology.num_tpus_per_task) == (1, NUM_DEVICES)
    resolver = sg.cluster_resolver.TPUClusterResolver("local")
    assert sg.TPUStrategy(resolver).cluster_resolver is resolver
    sg.tpu.shutdown_tpu_system()
    with pytest.raises(ValueError, match="cluster_resolver=3 is of type int"):
        sg.tpu.shutdown_tpu_system(3)


def _classifier(scope: Scope) -> dict[str, Any]:
    x, y = classification(12)
    with scope():
        model = small_classifier()
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return fitted(model, x, y, batch_size=6)


def test_training_is_that_of_one_device() -> None:
    strategy = sg.TPUStrategy(None, assigned(2), steps_per_run=2)
    assert not differences(carried_out(_classifier, strategy.scope), plain_keras(_classifier))


def test_assignment_says_which_devices_take_part() -> None:
    assignment = assigned(3)
    strategy = sg.TPUStrategy(experimental_device_assignment=assignment)
    assert strategy.device_assignment is assignment
    assert [device.id for device in strategy.topology.devices] == [0, 1, 2]
    copied = copy.deepcopy(strategy)
    assert copied.topology.devices == strategy.topology.devices
    assert copied.device_assignment.num_replicas == 3


def test_steps_of_a_call_are_the_default_of_compile_and_run_steps() -> None:
    strategy = sg.TPUStrategy(None, assigned(2), steps_per_run=3)
    with strategy.scope():
        assert compiled().steps_per_execution == 3
        assert compiled(steps_per_execution=1).steps_per_execution == 1
        outside = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    outside.compile("sgd", "mse")
    assert outside.steps_per_execution == 3
    iterator = iter(strategy.distribute_dataset([np.full(2, n) for n in range(5)]))
    first = strategy.run_steps(np.sum, iterator, reduce="sum")
    assert first.tolist() == [0, 2, 4]
    assert strategy.run_steps(np.sum, iterator, 1, reduce="sum").tolist() == [6]
    without = sg.TPUStrategy(None, assigned(2))
    with without.scope():
        assert compiled().steps_per_execution == 1
    with pytest.raises(TypeError, match="run_steps received num_steps=None"):
        without.run_steps(np.sum, iter(without.distribute_dataset([np.zeros(2)])))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"tpu_cluster_resolver": "local"}, ValueError, "cluster_resolver='local' is of type str"),
        ({"experimental_device_assignment": 8}, ValueError, "device_assignment=8 is a number"),
        ({"experimental_device_assignment": [[0]]}, ValueError, "assignment=[[0]] is of type list"),
        ({"experimental_spmd_xla_partitioning": 1}, TypeError, "xla_partitioning=1 is of type int"),
        ({"steps_per_run": 0}, ValueError, "received steps_per_run=0"),
        ({"steps_per_run": True}, TypeError, "received steps_per_run=True"),
    ],
)
def test_arguments_that_cannot_be_are_refused(arguments, error, message) -> None:
    with pytest.raises(error, match=re.escape(message)):
        sg.TPUStrategy(**arguments)


def test_several_cores_a_replica_are_its_logical_devices() -> None:
    assignment = assigned(4, computation_shape=[2, 1, 1, 1])
    strategy = sg.TPUStrategy(None, assignment, layout_map={"kernel": (None, "logical")})
    assert strategy.num_replicas_in_sync == 4
    with strategy.scope():
        kernel = sg.Variable(np.ones((2, 6), "float32"), name="kernel")
    shards = kernel.storage.addressable_shards
    assert sorted(shard.device.id for shard in shards) == list(range(8))
    assert {shard.data.shape for shard in shards} == {(2, 3)}


def test_a_number_of_devices_beside_an_assignment_is_refused() -> None:
    with pytest.raises(ValueError, match="devices_per_replica=2 and a device assignment were"):
        sg.TPUStrategy(None, assigned(4, computation_shape=[2, 1, 1, 1]), devices_per_replica=2)
    assert sg.TPUStrategy(devices_per_replica=2, shard_state="all").num_replicas_in_sync == 4


def test_one_logical_device_cannot_be_chosen_under_spmd_partitioning() -> None:
    assignment = assigned(4, computation_shape=[2, 1, 1, 1])
    strategy = sg.TPUStrategy(None, assignment, experimental_spmd_xla_partitioning=True)

    def step() -> object:
        return strategy.experimental_assign_to_logical_device(np.ones(2, "float32"), 0)

    with pytest.raises(ValueError, match="under SPMD partitioning"):
        strategy.run(step)


def test_state_may_be_shared_out_all_or_by_rules() -> None:
    def made(strategy: sg.TPUStrategy, name: str) -> Any:
        with strategy.scope():
            return sg.Variable(np.ones((64, 32), "float32"), name=name)

    by_rule = sg.TPUStrategy(placement={"table": "sharded"})
    for variable in (made(sg.TPUStrategy(shard_state="all"), "any"), made(by_rule, "table")):
        assert {one.data.shape for one in variable.stored.addressable_shards} == {(8, 32)}
    assert made(by_rule, "other").store is None


def test_machine_without_a_tpu_learns_what_to_do(monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_TPU_PLATFORM")
    for call in (sg.TPUStrategy, sg.tpu.initialize_tpu_system, sg.tpu.shutdown_tpu_system):
        with pytest.raises(sg.errors.NotFoundError, match=r"no TPU that JAX can use(?s:.)*=cpu"):
            call()
    monkeypatch.setenv("STRATAGEM_TPU_PLATFORM", "gpu")
    with pytest.raises(ValueError, match="'gpu' is not a platform for TPUStrategy"):
        sg.TPUStrategy()


@dataclasses.dataclass(frozen=True)
class _Chip:
    process_index: int
    platform: str = "cpu"


def test_tpu_of_more_hosts_than_are_named_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(tpu_system.jax, "devices", lambda platform: [_Chip(0), _Chip(1)])
    with pytest.raises(ValueError, match="The TPU has 2 hosts, and the resolver tells of 1"):
        sg.TPUStrategy()


class _Named(sg.cluster_resolver.TPUClusterResolver):
    """A TPU of two hosts."""

    def __init__(self) -> None:
        super().__init__("grpc://10.0.0.1,grpc://10.0.0.2")

    def processes(self) -> Processes:
        return Processes(2, 0, "10.0.0.1:8482", 0, 1)


def test_hosts_on_which_jax_finds_no_tpu_learn_so(monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_TPU_PLATFORM")
    monkeypatch.setattr(tpu_system, "join", lambda *_: tuple(jax.devices()))
    with pytest.raises(sg.errors.NotFoundError, match="JAX uses the platform 'cpu'"):
        sg.TPUStrategy(_Named())


def test_other_errors_of_starting_are_passed_on(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET", "0123456789abcdef" * 4)
    assert jax.devices()
    with pytest.raises(RuntimeError, match="JAX started before"):
        sg.TPUStrategy(_Named())


def test_slices_are_one_cluster(monkeypatch) -> None:
    """Each knows its own hosts and the coordinator, and all have to give the same account."""
    identities = []
    for number, hosts in enumerate(["s0,s1", "t0,t1"]):
        monkeypatch.setenv("TPU_WORKER_HOSTNAMES", hosts)
        monkeypatch.setenv("TPU_WORKER_ID", "1")
        monkeypatch.setenv("MEGASCALE_NUM_SLICES", "2")
        monkeypatch.setenv("MEGASCALE_SLICE_ID", str(number))
        monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "s0")
        resolver = tpu_system.find_resolver(None)
        identities.append(identity_of(resolver, resolver.processes()))
    assert [one.process_id for one in identities] == [1, 3]
    assert identities[0].same == identities[1].same
    assert identities[0].labels == tuple(f"process {index}" for index in range(4))
