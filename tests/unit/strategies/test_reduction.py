"""reduce and gather of one value, against NumPy over all its parts."""

from __future__ import annotations

import copy
import gc
import os
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.errors import InvalidArgumentError
from stratagem.execution.programs.elastic import ElasticLockstep
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.options import ReduceOp
from stratagem.strategies import reduction
from stratagem.strategies.datasets import on_input_workers
from stratagem.variables.distributed import PerReplica, regroup
from tests.unit.input.service.servers import InputServers, input_servers
from tests.unit.launch.remote.living import descendants, wait_for_end

TOPOLOGY = Topology(tuple(jax.devices()[:3]))
SUM, MEAN = ReduceOp.SUM, ReduceOp.MEAN


def per_replica(parts):
    return regroup([jnp.asarray(part) for part in parts], TOPOLOGY)


def reduce(op, value, axes, num_replicas=3):
    return reduction.reduce(op, value, axes, num_replicas=num_replicas)


def random_parts(*shapes):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype("float32") for shape in shapes]


def test_axes_that_leave_the_unequal_one_are_refused() -> None:
    value = per_replica(random_parts((2, 3), (1, 3), (2, 3)))
    with pytest.raises(InvalidArgumentError, match=r"reduce with axis=\(1,\) received parts"):
        reduce(SUM, value, (1,))
    with pytest.raises(InvalidArgumentError, match="reduce with axis=None received parts"):
        reduce(MEAN, value, None)


def test_parts_that_differ_in_other_axes_can_be_reduced_over_these(tolerance) -> None:
    parts = random_parts((2, 1), (2, 3), (2, 2))
    value = per_replica(parts)
    assert value.objects is not None
    for op, reduced in ((SUM, np.sum), (MEAN, np.mean)):
        got = reduce(op, value, (1,))
        expected = reduced(np.concatenate(parts, axis=1), axis=1)
        np.testing.assert_allclose(got, expected, **tolerance("float32"))


@pytest.mark.parametrize(
    ("dtype", "of_sum", "of_mean"),
    [
        ("bool", "int32", "float32"),
        ("int8", "int8", "float32"),
        ("int32", "int32", "float32"),
        ("uint32", "uint32", "float32"),
        ("float16", "float16", "float16"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("complex64", "complex64", "complex64"),
    ],
)
@pytest.mark.parametrize("axes", [None, (0,)], ids=str)
def test_sum_keeps_the_dtype_and_mean_of_integers_is_a_float(dtype, of_sum, of_mean, axes) -> None:
    value = per_replica([jnp.array([1, 0, 1], dtype)] * 3)
    total, mean = reduce(SUM, value, axes), reduce(MEAN, value, axes)
    assert (total.dtype.name, mean.dtype.name) == (of_sum, of_mean)
    wanted = (6, 2 / 3) if axes else ([3, 0, 3], [1, 0, 1])
    np.testing.assert_allclose(np.asarray(total, "complex64"), wanted[0], rtol=1e-2)
    np.testing.assert_allclose(np.asarray(mean, "complex64"), wanted[1], rtol=1e-2)


def test_nothing_at_all_has_sum_zero_and_no_mean() -> None:
    value = per_replica([np.zeros((0, 2), "float32")] * 3)
    np.testing.assert_array_equal(reduce(SUM, value, (0,)), [0.0, 0.0])
    assert np.isnan(reduce(MEAN, value, (0,))).all()


def test_repeated_axis_is_refused() -> None:
    value = per_replica(np.arange(6.0, dtype="float32").reshape(3, 2))
    with pytest.raises(ValueError, match=r"more than once|[Dd]uplicate"):
        reduce(MEAN, value, (0, -1))


def test_part_of_a_compiled_step_outside_merge_call_is_refused() -> None:
    leaked = PerReplica(local=jnp.ones(2))
    for use in (
        lambda: reduce(SUM, leaked, None),
        lambda: reduction.gather(leaked, 0, num_replicas=3),
    ):
        with pytest.raises(ValueError, match="of a compiled step was used outside merge_call"):
            use()
    with pytest.raises(ValueError, match="belongs to a compiled step"):
        sg.MirroredStrategy(["cpu:0", "cpu:1"]).local_results(leaked)


@pytest.mark.parametrize(("count", "eagerly"), [(1, False), (2, False), (2, True)])
def test_random_keys_are_averaged_where_they_agree_and_gathered(count, eagerly) -> None:
    strategy = sg.MirroredStrategy([f"cpu:{index}" for index in range(count)])
    keys = jax.random.split(jax.random.key(3), 2)

    def bits(keys: Any) -> list[Any]:
        return jax.random.key_data(keys).tolist()

    sg.config.run_eagerly(eagerly)
    try:
        state = strategy.run(lambda keys: {"w": jnp.ones(()), "keys": keys}, args=(keys,))
        inside = strategy.run(lambda k: sg.get_replica_context().all_gather(k, 0), args=(keys,))
        with pytest.raises(TypeError, match="reduce received random keys, which cannot be added"):
            strategy.reduce("MEAN", state["keys"], axis=0)
        with pytest.raises(TypeError, match="all_reduce received random keys, which cannot be"):
            strategy.run(lambda: sg.get_replica_context().all_reduce("SUM", keys[0]))
    finally:
        sg.config.run_eagerly(False)
    mean = strategy.reduce("MEAN", state, axis=None)
    assert (float(mean["w"]), bits(mean["keys"])) == (1.0, bits(keys))
    assert bits(strategy.gather(state["keys"], axis=-1)) == count * bits(keys)
    assert bits(strategy.local_results(inside)[-1]) == count * bits(keys)
    if count > 1:
        others = strategy.distribute_values_from_function(
            lambda context: jax.random.key(context.replica_id_in_sync_group)
        )
        with pytest.raises(TypeError, match="reduce received random keys, which cannot be added"):
            strategy.reduce("MEAN", others, axis=None)


def test_parts_of_a_replica_of_several_processes_count_once(monkeypatch) -> None:
    """Each of two replicas has two processes, and parts of unlike shapes are exchanged."""
    received = [[np.zeros((2, 1))], [np.zeros((2, 1))], [np.ones((1, 3))], [np.ones((1, 3))]]
    group = types.SimpleNamespace(exchange=lambda name, own: received)
    monkeypatch.setattr(reduction, "current_group", lambda: group)
    value = reduction.of_all(PerReplica(objects=(received[0][0],)), num_replicas=2)
    assert [part.shape for part in value.components] == [(2, 1), (1, 3)]


# Bytes that the program that XLA compiles sends in each step.


# Datasets that input workers read for a strategy: the same training, and no process is left.

_X = np.random.default_rng(0).normal(size=(100, 3)).astype("float32")
_Y = _X.sum(1, keepdims=True)
_LIMIT_S = 60


def _trained(strategy: sg.Strategy, dataset: Any) -> list[np.ndarray]:
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(dataset, epochs=2, verbose=0)
    return model.get_weights()


@pytest.fixture
def servers(monkeypatch) -> Iterator[InputServers]:
    with input_servers(1) as servers:
        monkeypatch.setenv("STRATAGEM_INPUT_SERVICE", servers.target)
        yield servers


@pytest.mark.slow
def test_fit_with_a_worker_of_its_own_is_plain_fit() -> None:
    before = descendants(os.getpid())
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = sg.input.Dataset((_X, _Y), batch_size=8, shuffle=True)
    distributed = strategy.distribute_dataset(dataset, sg.InputOptions(input_workers=1))
    assert len(distributed) == 13
    plain = _trained(strategy, strategy.distribute_dataset(dataset))
    np.testing.assert_array_equal(plain[0], _trained(strategy, distributed)[0])
    workers = descendants(os.getpid()) - before
    assert workers
    del distributed
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "input service close":
            thread.join(_LIMIT_S)
    assert not wait_for_end(workers)


def test_a_running_service_is_used(servers) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = sg.input.Dataset((_X, _Y), batch_size=8, shuffle=True)
    options = sg.InputOptions(input_workers=4)
    distributed = strategy.distribute_dataset(dataset, options)
    plain = _trained(strategy, strategy.distribute_dataset(dataset))
    np.testing.assert_array_equal(plain[0], _trained(strategy, distributed)[0])
    with pytest.raises(TypeError, match="cannot be sent to input workers"):
        strategy.distribute_dataset((np.full(2, n) for n in range(5)), options)


def _strategy(executor: type, *, spans_processes: bool, inputs: Any) -> Any:
    topology = types.SimpleNamespace(spans_processes=spans_processes, processes_of_inputs=inputs)
    return types.SimpleNamespace(executor=object.__new__(executor), topology=topology)


@pytest.mark.parametrize(
    ("executor", "spans_processes", "inputs", "policy", "message"),
    [
        (Lockstep, False, ((0,), (1,)), "DATA", "was passed with <AutoShardPolicy.DATA: 2>"),
        (Lockstep, True, ((0,), (1,)), "AUTO", "have no common input service"),
        (Lockstep, True, ((0, 1),), "AUTO", "to a strategy whose replicas span processes"),
        (ElasticLockstep, True, ((0,), (1,)), "AUTO", "was passed to an ElasticStrategy"),
    ],
)
def test_workers_that_do_not_suit_are_refused(
    executor, spans_processes, inputs, policy, message
) -> None:
    options = sg.InputOptions(input_workers=1, auto_shard_policy=sg.AutoShardPolicy[policy])
    strategy = _strategy(executor, spans_processes=spans_processes, inputs=inputs)
    with pytest.raises(ValueError, match=message):
        on_input_workers(strategy, sg.input.Dataset([_X]).as_source(), options)


# Devices of `strategy.extended`, and values that it refuses.


@pytest.fixture
def pair():
    return sg.MirroredStrategy(["cpu:2", "cpu:4"])


def test_devices_of_workers_and_parameters_are_those_of_the_replicas(pair) -> None:
    devices = (jax.devices()[2], jax.devices()[4])
    assert pair.extended.worker_devices == devices
    assert pair.extended.parameter_devices == devices
    seen = []
    pair.run(lambda: seen.append(sg.get_replica_context().devices))
    assert seen == [devices]


def test_default_strategy_has_no_devices() -> None:
    extended = sg.get_strategy().extended
    for name in ("worker_devices", "parameter_devices"):
        with pytest.raises(RuntimeError, match=f"{name} was asked of the default strategy"):
            getattr(extended, name)


def test_extended_of_a_copy_is_a_view_of_the_copy(pair) -> None:
    copied = copy.deepcopy(pair)
    assert copied.extended is not pair.extended
    with copied.scope():
        variable = sg.Variable(1.0)
    assert copied.extended.variable_created_in_scope(variable)
    assert not pair.extended.variable_created_in_scope(variable)
