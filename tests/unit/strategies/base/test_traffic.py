"""Bytes of each step, compared with the collectives of the program that XLA compiles."""

from __future__ import annotations

import collections

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.strategies.base.automatic import AutomaticOps

_DEVICES = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
_COUNT = len(_DEVICES)
_BATCH = (np.ones((8, 64), "float32"), np.ones((8, 4), "float32"))


def _model(optimizer: str = "adam") -> keras.Model:
    """A large kernel and small variables; of batch normalization, two are trained and two not."""
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(128, "relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(4),
    ]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


_LARGE = 64 * 128 * 4
_SMALL = (128 + 2 * 128 + 128 * 4 + 4) * 4


def _sizes(strategy: sg.Strategy, model: keras.Model | None = None) -> dict[tuple[str, str], int]:
    transfers = strategy.describe(model).transfers
    assert len({(one.kind, one.arrays) for one in transfers}) == len(transfers)
    return {(one.kind, one.arrays): one.num_bytes or 0 for one in transfers}


@pytest.mark.parametrize("shard_state", [None, "optimizer", "all"])
def test_sizes_are_of_the_gradients_and_values(shard_state) -> None:
    strategy = sg.MirroredStrategy(_DEVICES, shard_state=shard_state)
    with strategy.scope():
        model = _model()
    trained = [np.asarray(one).nbytes for one in model.trainable_variables]
    if shard_state is None:
        expected = {("all-reduce", "gradients"): sum(trained)}
    else:
        expected = {
            ("all-gather", "values"): _LARGE,
            ("reduce-scatter", "gradients"): _LARGE,
            ("all-reduce", "gradients"): _SMALL,
        }
    assert sum(trained) == _LARGE + _SMALL
    assert _sizes(strategy, model) == _sizes(strategy) == expected


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("shard_state", [None, "optimizer", "all"])
def test_sizes_are_of_the_collectives_in_the_compiled_step(shard_state, optimizer) -> None:
    strategy = sg.MirroredStrategy(_DEVICES, shard_state=shard_state)
    with strategy.scope():
        model = _model(optimizer)
        model.optimizer.build(model.trainable_variables)
    plan = sg.plan(model, _BATCH, f"{_COUNT}xH100", strategy=strategy)
    compiled: collections.defaultdict[str, float] = collections.defaultdict(float)
    for message in plan.reductions:
        compiled[message.kind] += message.num_bytes * message.times
    described = {kind: size for (kind, _), size in _sizes(strategy, model).items()}
    assert described == dict(compiled)


_OPS = {
    "bfloat16 sums": lambda: AutomaticOps(sg.CommunicationOptions(reduction_dtype="bfloat16")),
    **{
        name: lambda name=name: sg.CompressedAllReduce(name)
        for name in ("bfloat16", "float16", "int8", "float8", "power_sgd")
    },
    "odd blocks": lambda: sg.CompressedAllReduce(sg.compression.Int8(block_elements=100)),
    "top_k": lambda: sg.CompressedAllReduce(sg.compression.TopK(fraction=0.03)),
}
_METHODS = {
    "local SGD": sg.local_updates.LocalSGD(period=8),
    "DiLoCo": sg.local_updates.DiLoCo(period=50, compression="power_sgd"),
    "streaming": sg.local_updates.StreamingDiLoCo(period=30, fragments=2, compression="int8"),
    "three fragments": sg.local_updates.StreamingDiLoCo(period=10, fragments=3),
}


def _two_kernels() -> keras.Model:
    """Two kernels that are compressed, of sizes that do not divide into blocks or replicas."""
    layers = [keras.Input((61,)), keras.layers.Dense(127), keras.layers.Dense(33)]
    model = keras.Sequential([*layers, keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model


def _sent_by_the_program(strategy: sg.Strategy) -> float:
    """Bytes that a replica sends in a step, from the messages of the compiled program."""
    batch = (np.ones((8, 61), "float32"), np.ones((8, 4), "float32"))
    plan = sg.plan(_two_kernels, batch, f"{_COUNT}xH100", strategy=strategy)
    # All-reduces send each part of an array on and back; what is gathered is sent once.
    rounds = {"all-reduce": 2, "all-to-all": 1, "all-gather": 1}
    assert plan.reductions
    return sum(
        rounds[one.kind] * one.times * one.num_bytes * (_COUNT - 1) / _COUNT
        for one in plan.reductions
    )


@pytest.mark.slow
@pytest.mark.parametrize("make", _OPS.values(), ids=_OPS)
def test_compressed_sums_send_as_much_as_the_compiled_step(make) -> None:
    strategy = sg.MirroredStrategy(_DEVICES, cross_device_ops=make())
    with strategy.scope():
        model = _two_kernels()
    transfers = strategy.describe(model).transfers
    described = sum(one.sent_bytes or 0 for one in transfers)
    sizes = [np.asarray(one).nbytes for one in model.trainable_variables]
    assert sum(one.num_bytes or 0 for one in transfers) == sum(sizes)
    # The program pads each of six arrays to a multiple of the replicas.
    assert described == pytest.approx(_sent_by_the_program(strategy), abs=6 * _COUNT)
    # Far from whole gradients, and so far from a count that leaves the compression out.
    assert described < 0.6 * 2 * sum(sizes) * (_COUNT - 1) / _COUNT


@pytest.mark.slow
@pytest.mark.parametrize("method", _METHODS.values(), ids=_METHODS)
def test_local_updates_send_as_much_as_the_compiled_step_on_average(method) -> None:
    strategy = sg.LocalUpdateStrategy(method, _DEVICES)
    with strategy.scope():
        model = _two_kernels()
    transfers = strategy.describe(model).transfers
    assert {one.every_steps for one in transfers} == {method.period}
    sizes = [np.asarray(one).nbytes for one in model.trainable_variables]
    assert sum(one.num_bytes or 0 for one in transfers) == sum(sizes)
    described = sum(one.sent_bytes or 0 for one in transfers)
    assert described == pytest.approx(_sent_by_the_program(strategy), abs=4)
    assert described <= 2 * sum(sizes) / method.period


def test_model_that_is_built_has_the_same_traffic() -> None:
    for strategy in (
        sg.MirroredStrategy(_DEVICES, cross_device_ops=sg.CompressedAllReduce("power_sgd")),
        sg.LocalUpdateStrategy(_METHODS["streaming"], _DEVICES),
    ):
        with strategy.scope():
            model = _two_kernels()
        before = strategy.describe(model).transfers
        model.optimizer.build(model.trainable_variables)
        assert strategy.describe(model).transfers == strategy.describe().transfers == before


def test_one_replica_of_local_updates_sends_nothing() -> None:
    strategy = sg.LocalUpdateStrategy(_METHODS["DiLoCo"], _DEVICES[:1])
    with strategy.scope():
        model = _two_kernels()
    assert _sizes(strategy, model) == {}


def test_optimizer_without_state_shards_nothing() -> None:
    strategy = sg.MirroredStrategy(_DEVICES, shard_state="optimizer")
    with strategy.scope():
        model = _model("sgd")
    assert ("reduce-scatter", "gradients") in _sizes(strategy, model)  # it might have state
    model.optimizer.build(model.trainable_variables)
    assert _sizes(strategy, model) == {("all-reduce", "gradients"): _LARGE + _SMALL}


def test_ring_sends_each_part_on() -> None:
    strategy = sg.MirroredStrategy(_DEVICES, shard_state="optimizer")
    with strategy.scope():
        model = _model()
    sent = {one.kind: one.sent_bytes for one in strategy.describe(model).transfers}
    # Each of n replicas passes n - 1 parts on; for a sum, another n - 1 come back.
    assert sent == {
        "all-reduce": 2 * _SMALL * (_COUNT - 1) // _COUNT,
        "reduce-scatter": _LARGE * (_COUNT - 1) // _COUNT,
        "all-gather": _LARGE * (_COUNT - 1) // _COUNT,
    }


def test_variables_on_the_host_are_copied_to_replicas_and_gradients_back() -> None:
    strategy = sg.CentralStorageStrategy(_DEVICES, parameter_device="cpu:0")
    with strategy.scope():
        model = _model()
    size = _LARGE + _SMALL
    assert _sizes(strategy, model) == {
        ("copy from the host to each replica", "values"): size,
        ("all-reduce", "gradients"): size,
        ("copy from replica 0 to the host", "gradients"): size,
    }


def test_rows_of_a_table_depend_on_the_batch() -> None:
    strategy = sg.CentralStorageStrategy(_DEVICES, parameter_device="cpu:0")
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Embedding(100_000, 8)])
    (rows,) = strategy.describe(model).transfers
    assert (rows.kind, rows.num_bytes, rows.sent_bytes) == ("exchange of rows", None, None)


def test_one_replica_and_frozen_variables_send_nothing() -> None:
    one = sg.OneDeviceStrategy("cpu:0")
    with one.scope():
        model = _model()
    assert _sizes(one, model) == {}
    two = sg.MirroredStrategy(_DEVICES[:2])
    with two.scope():
        frozen = _model()
    frozen.trainable = False
    assert _sizes(two, frozen) == {}


def test_half_precision_counts_half() -> None:
    strategy = sg.MirroredStrategy(_DEVICES)
    with strategy.scope():
        weights = sg.Variable(np.ones((10, 10)), dtype="bfloat16")
    assert _sizes(strategy) == {("all-reduce", "gradients"): 200}
    assert weights.dtype == "bfloat16"
