"""`ElasticStrategy` in one process, and its refusals; clusters are in tests/multiprocess."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices import finding as separate_processes
from stratagem.devices.mesh import REPLICA_AXIS
from stratagem.errors import NOT_NEEDED
from stratagem.execution.analysis.retracing import retrace
from stratagem.execution.programs import elastic_lockstep
from stratagem.group.elastic.views import not_admitted
from stratagem.strategies import elastic as elastic_members
from stratagem.strategies.compile_only import CompileOnlyStrategy
from stratagem.strategies.elastic import BackedOps
from stratagem.strategies.local_topology import local_topology
from stratagem.strategies.local_update import islands_of


def test_without_a_cluster_it_is_one_device() -> None:
    strategy = sg.ElasticStrategy()
    assert strategy.num_replicas_in_sync == 1
    assert strategy.members == strategy.participants == (0,)
    with strategy.scope():
        scale = sg.Variable(2.0)
    assert float(strategy.run(lambda x: x * scale, args=(np.float32(3),))) == 6.0


def test_a_resolver_of_another_type_is_refused() -> None:
    resolver: object = "worker"
    with pytest.raises(ValueError, match="cluster_resolver='worker' is of type str"):
        sg.ElasticStrategy(resolver)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (-1, ValueError, "num_backup_workers=-1 is out of range"),
        (1.0, TypeError, "num_backup_workers=1.0 is of type float"),
        (True, TypeError, "num_backup_workers=True is of type bool"),
    ],
)
def test_numbers_of_backup_workers_that_no_cluster_has_are_refused(number, kind, words) -> None:
    with pytest.raises(kind, match=words):
        sg.ElasticStrategy(num_backup_workers=number)


def test_backup_workers_leave_one_to_make_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    with pytest.raises(ValueError, match="num_backup_workers=2 of 2 workers is out of range"):
        sg.ElasticStrategy(num_backup_workers=2)


def test_backup_workers_and_spares_exclude_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    monkeypatch.setenv("STRATAGEM_NUM_SPARES", "1")
    with pytest.raises(ValueError, match="num_backup_workers is 1, and STRATAGEM_NUM_SPARES is 1"):
        sg.ElasticStrategy(num_backup_workers=1)


def test_a_process_that_is_not_admitted_ends_with_a_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise not_admitted("worker 1", 1, 1)

    _set_cluster(monkeypatch)
    monkeypatch.setattr(elastic_members, "ElasticGroup", refuse)
    with pytest.raises(SystemExit) as ended:
        sg.ElasticStrategy(num_backup_workers=1)
    assert ended.value.code == NOT_NEEDED
    assert "while the others train with num_backup_workers=1" in capsys.readouterr().err


def test_a_process_alone_has_no_backup_workers() -> None:
    strategy = sg.ElasticStrategy(num_backup_workers=1)
    assert strategy.num_replicas_in_sync == 1


def test_another_constant_batch_is_refused() -> None:
    batch: object = "both"
    with pytest.raises(ValueError, match="constant_batch='both' was passed"):
        sg.ElasticStrategy(constant_batch=batch)  # pyright: ignore[reportArgumentType]


def _set_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}
    task = {"type": "worker", "index": 0}
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": task}))


def test_a_cluster_of_spares_alone_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    monkeypatch.setenv("STRATAGEM_NUM_SPARES", "2")
    with pytest.raises(ValueError, match="STRATAGEM_NUM_SPARES is 2, but the cluster has 2"):
        sg.ElasticStrategy()


def test_tls_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch)
    found = elastic_members.Credentials(None, certificates=object())  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(elastic_members.Credentials, "find", lambda *args, **kwargs: found)
    with pytest.raises(ValueError, match="STRATAGEM_TLS_DIR is set"):
        sg.ElasticStrategy()


def test_a_cluster_without_addresses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.strategies.membership._labels", lambda *args: None)
    _set_cluster(monkeypatch)
    with pytest.raises(ValueError, match="does not list the address of every process"):
        sg.ElasticStrategy()


def test_several_devices_of_a_process_are_refused() -> None:
    with pytest.raises(RuntimeError, match="This process has 2 devices: cpu:0, cpu:1"):
        separate_processes.check_device(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    ("platforms", "gpus", "has_plugin", "words"),
    [
        ("cuda,cpu", (), False, "JAX_PLATFORMS is 'cuda,cpu'"),
        (None, ("0", "1"), True, "this host's GPUs: 0, 1"),
        (None, ("0", "1"), False, ""),
        (None, (), True, ""),
        ("cpu", ("0",), True, ""),
    ],
)
def test_gpus_are_refused_before_jax_waits_for_those_of_others(
    monkeypatch, platforms, gpus, has_plugin, words
) -> None:
    monkeypatch.setattr(separate_processes, "local_gpus", lambda: gpus)
    monkeypatch.setattr(separate_processes, "_has_gpu_plugin", lambda: has_plugin)
    expected = pytest.raises(RuntimeError, match=words) if words else contextlib.nullcontext()
    with expected:
        separate_processes.check_platform(platforms)


def test_steps_that_cannot_run_again_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(sg.config, "runs_eagerly", lambda: True)
    strategy = sg.ElasticStrategy()
    executor = elastic_lockstep.ElasticLockstep(strategy)
    with pytest.raises(NotImplementedError, match="was called op by op"):
        executor.run(lambda: 1, (), {})


def test_datasets_that_members_read_apart_are_refused(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    with pytest.raises(NotImplementedError, match="was called on an ElasticStrategy"):
        strategy.distribute_datasets_from_function(lambda context: [np.arange(2)])


def test_datasets_of_members_have_whole_batches(monkeypatch) -> None:
    strategy = sg.ElasticStrategy()
    monkeypatch.setattr(strategy, "executor", elastic_lockstep.ElasticLockstep(strategy))
    dataset = strategy.distribute_dataset([np.arange(4), np.arange(3)])
    assert [np.asarray(batch).tolist() for batch in dataset] == [[0, 1, 2, 3], [0, 1, 2]]
    batches = iter(dataset)
    next(batches)
    again = iter(dataset)
    again.set_state(batches.get_state())
    assert np.asarray(next(again)).tolist() == [0, 1, 2]


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


@pytest.mark.parametrize("given", [0, -2, 3, 16])
def test_number_that_does_not_divide_the_replicas_is_refused(given) -> None:
    with pytest.raises(ValueError, match='pass "process" to train in lockstep'):
        islands_of(topology(4, 4), given)


@pytest.mark.parametrize("given", [2.0, True, None, "machine"])
def test_number_of_another_type_is_refused(given) -> None:
    with pytest.raises(TypeError, match='or "process"'):
        islands_of(topology(4, 4), given)


def test_island_of_parts_of_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="lockstep is for the fast links"):
        islands_of(topology(3, 3), 2)


def test_processes_of_unequal_size_are_refused() -> None:
    with pytest.raises(ValueError, match="or pass replicas_per_island=1"):
        islands_of(topology(4, 2), "process")


def test_replicas_of_several_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="pass a flat list of devices"):
        islands_of(topology(4, groups=((),)), 2)


def test_strategy_has_islands() -> None:
    devices = [f"cpu:{index}" for index in range(4)]
    strategy = sg.LocalUpdateStrategy(devices=devices, replicas_per_island=2)
    assert (strategy.num_islands, strategy.num_replicas_in_sync) == (2, 4)
    assert sg.LocalUpdateStrategy(devices=devices).num_islands == 4
    alone = sg.LocalUpdateStrategy(devices=devices, replicas_per_island="process")
    assert (alone.num_islands, alone.islands) == (1, None)


# Means over the replicas that take part, of sums that stand for all.

_PARTS = np.array([[1.0, 2.0], [4.0, 8.0], [100.0, 100.0]])


def _combined(op: sg.ReduceOp, dtype: str, scale: float, participants: list[int]) -> Any:
    """Returns the result of a step in which sums of floats are those of some replicas, scaled."""
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    all_reduce = BackedOps().all_reduce(strategy.topology)
    traced = jax.make_jaxpr(lambda x: all_reduce.one(op, x), axis_env=[(REPLICA_AXIS, 3)])(
        jnp.asarray(_PARTS[0], dtype)
    )
    totals = iter([_PARTS[participants].sum(0), np.float64(len(participants))])

    def add(eqn: Any, inputs: list[Any], is_inside: bool) -> list[Any]:
        del is_inside
        results = []
        for one in inputs:
            factor = scale if jnp.issubdtype(one.dtype, jnp.inexact) else 1
            results.append(jnp.asarray(next(totals) * factor, one.dtype))
        return results

    rules = dict.fromkeys(("psum", "psum_invariant"), add)
    return retrace(traced, [jnp.asarray(_PARTS[0], dtype)], rules=rules)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_a_mean_is_that_of_the_participants_for_any_rows_of_theirs(dtype) -> None:
    mean = _combined(sg.ReduceOp.MEAN, dtype, 32 / 21, [0, 1])
    np.testing.assert_allclose(np.asarray(mean, np.float32), [2.5, 5.0], rtol=1e-2)
    assert mean.dtype == (jnp.float32 if dtype == "int32" else jnp.dtype(dtype))


def test_a_sum_is_what_the_members_combine() -> None:
    total = _combined(sg.ReduceOp.SUM, "float32", 1.5, [0, 1])
    np.testing.assert_allclose(total, [7.5, 15.0])


def test_values_outside_of_a_step_are_reduced_as_always() -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    all_reduce = BackedOps().all_reduce(strategy.topology)
    mean = all_reduce.parts(sg.ReduceOp.MEAN, [1.0, 4.0], are_gradients=True)
    assert float(mean) == 2.5
    assert all_reduce.axis.size == 2


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


# `LocalUpdateStrategy`: its arguments.


def test_method_is_local_sgd_by_default() -> None:
    strategy = sg.LocalUpdateStrategy(devices=["cpu:0", "cpu:1"])
    assert strategy.local_updates == sg.local_updates.LocalSGD()
    assert strategy.num_replicas_in_sync == 2
    assert sg.LocalUpdateStrategy().cluster_resolver.task_type is None


def test_other_strategies_train_in_lockstep() -> None:
    assert sg.MirroredStrategy(["cpu:0", "cpu:1"]).local_updates is None


def test_method_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="method='diloco' is of type str"):
        sg.LocalUpdateStrategy("diloco")


def test_devices_and_a_cluster_are_refused() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec({"worker": ["127.0.0.1:1234"]})
    )
    with pytest.raises(ValueError, match="a cluster resolver were given"):
        sg.LocalUpdateStrategy(devices=["cpu:0"], cluster_resolver=resolver)


# Strategies of devices that are not here.


def test_replicas_are_the_devices() -> None:
    strategy = CompileOnlyStrategy(jax.devices()[:3])
    assert strategy.num_replicas_in_sync == 3
    assert strategy.topology.devices == tuple(jax.devices()[:3])


def test_gradients_are_combined_as_requested() -> None:
    ops = sg.RingAllReduce()
    assert CompileOnlyStrategy(jax.devices()[:2], ops).cross_device_ops is ops


def test_run_is_refused() -> None:
    with pytest.raises(RuntimeError, match="run was called on the 2 devices"):
        CompileOnlyStrategy(jax.devices()[:2]).run(lambda: 1)


def test_no_device_is_refused() -> None:
    with pytest.raises(ValueError, match=r"devices=\(\) is empty"):
        CompileOnlyStrategy([])
