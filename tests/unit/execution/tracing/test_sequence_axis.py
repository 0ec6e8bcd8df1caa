"""Sequences split over the devices of a replica: the numbers of one device, computed in parts."""

from __future__ import annotations

import contextlib
import copy
import functools
import re
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.mesh import Topology
from stratagem.execution.programs.program import sequence_options
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.tracer import trace_replica_function
from stratagem.planning.planner import planned_strategy
from stratagem.planning.targets import parse_target
from tests.unit.strategies.decoders import NUM_WORDS, compiled_decoder, largest_difference

RNG = np.random.default_rng(7)
# Six rows a batch over two replicas, then one: the second replica only pads.
WORDS, NEXT_WORDS = RNG.integers(0, NUM_WORDS, (2, 7, 8), dtype="int32")
FIT: dict[str, Any] = {"batch_size": 6, "epochs": 2, "verbose": 0, "shuffle": False}


def strategy_of(replicas: int, parts: int, **options: Any) -> sg.MirroredStrategy:
    names = [f"cpu:{index}" for index in range(replicas * parts)]
    return sg.MirroredStrategy(names, devices_per_replica=parts, sequence_axis=1, **options)


def made(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    return compiled_decoder(scope, keras.optimizers.Adam(1e-3, epsilon=1e-4), num_layers=1)


@functools.cache
def alone() -> tuple[keras.Model, dict[str, Any]]:
    model = made(contextlib.nullcontext())
    return model, numbers_of(model)


def numbers_of(model: keras.Model) -> dict[str, Any]:
    return {
        "losses": model.fit(WORDS, NEXT_WORDS, **FIT).history["loss"],
        "loss": model.evaluate(WORDS, NEXT_WORDS, batch_size=4, verbose=0),
        "logits": model.predict(WORDS, batch_size=4, verbose=0),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "parts", "shard_state"),
    [
        (1, 4, None),
        (2, 2, None),
        (2, 4, "optimizer"),
        (2, 4, "all"),
    ],
)
def test_decoder_is_that_of_one_device(replicas, parts, shard_state) -> None:
    """Positions and causal masks of a part are those of the whole."""
    model = made(strategy_of(replicas, parts, shard_state=shard_state).scope())
    found = numbers_of(model)
    reference, expected = alone()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    assert largest_difference(model, reference) < 1e-5


@pytest.mark.compatibility
def test_a_step_of_fit_is_that_of_one_device() -> None:
    """One update with SGD, whose change is the gradient."""
    models: list[keras.Model] = []
    for scope in (contextlib.nullcontext(), strategy_of(1, 2).scope()):
        keras.utils.set_random_seed(3)
        with scope:
            x = keras.Input((8, 12))
            attention = keras.layers.MultiHeadAttention(2, 6, use_bias=False)
            attended = attention(x, x, use_causal_mask=True)
            model = keras.Model(x, keras.layers.Dense(3)(attended))
            model.compile("sgd", "mse")
        y = np.sin(np.arange(2 * 8 * 3.0)).reshape(2, 8, 3)
        model.fit(np.cos(np.arange(2 * 8 * 12.0)).reshape(2, 8, 12), y, verbose=0)
        models.append(model)
    assert largest_difference(*models) < 1e-6


def attend(x: jax.Array) -> jax.Array:
    """Attends to earlier positions with four heads and one of keys and values."""
    heads = jnp.reshape(jnp.cos(x), (*x.shape[:2], 4, 16))
    return keras.ops.dot_product_attention(heads, heads[:, :, :1], heads[:, :, 1:2], is_causal=True)


@pytest.mark.parametrize("replicas", [1, 2])
def test_devices_exchange_keys_and_values_only(replicas) -> None:
    strategy = strategy_of(replicas, 4)
    x = RNG.normal(size=(2, 32, 64)).astype("float32")
    result = strategy.local_results(strategy.run(attend, (x,)))[-1]
    np.testing.assert_allclose(result, attend(jnp.asarray(x)), rtol=1e-5, atol=1e-6)
    (program,) = strategy.executor._programs.values()
    text = program._step.lower([], [], [], [x], [], []).compile().as_text()
    assert "f32[2,8,64]" in next(line for line in text.splitlines() if "cosine" in line)
    # The last one gathers the result itself.
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    sizes = [np.prod([int(size) for size in shape.split(",")]) for shape in gathered]
    assert sorted(sizes) == [2 * 32 * 16, 2 * 32 * 16, x.size]


def test_tpu_compiler_gathers_keys_and_values(monkeypatch) -> None:
    """A ring, its default, keeps the scores of all parts."""
    monkeypatch.setattr(Topology, "platform", "tpu")
    found: list[Any] = []
    for strategy in (strategy_of(1, 2), sg.OneDeviceStrategy("cpu:0")):
        arguments = flatten_arguments((np.ones((2, 8)),), {}, num_replicas=1)
        trace = trace_replica_function(strategy, jnp.sum, arguments)
        found.append(sequence_options(trace, strategy.topology))
    assert found == [{"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}, None]
    monkeypatch.undo()
    assert sequence_options(trace, strategy.topology) is None


def test_each_array_is_split_once_if_its_size_allows() -> None:
    strategy = strategy_of(1, 4)
    arrays = {"ids": np.ones((2, 8)), "lengths": np.ones(2), "weight": np.ones((2, 1))}
    shardings: dict[str, Any] = {}

    def step(values: dict[str, Any]) -> Any:
        for name, value in values.items():
            jax.debug.inspect_array_sharding(
                value, callback=lambda found, name=name: shardings.__setitem__(name, found)
            )
        return sum(jnp.sum(value) for value in values.values())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert strategy.run(step, (arrays,)) == 20
    assert shardings["ids"].shard_shape((2, 8)) == (2, 2)
    assert shardings["lengths"].shard_shape((2,)) == (2,)
    assert shardings["weight"].shard_shape((2, 1)) == (2, 1)


def test_length_that_cannot_be_divided_stays_whole_with_a_warning() -> None:
    strategy = strategy_of(2, 4)
    match = r"shape \(2, 6\) cannot be divided along sequence_axis=1: 6 over 4 devices"
    with pytest.warns(UserWarning, match=match):
        result = strategy.run(jnp.sum, (np.ones((2, 6)),))
    assert [float(value) for value in strategy.local_results(result)] == [12, 12]


@pytest.mark.parametrize("axis", [0, -1, True, "1"])
def test_other_axes_are_refused(axis) -> None:
    with pytest.raises(ValueError, match="is not an axis after the batch"):
        sg.MirroredStrategy(["cpu:0", "cpu:1"], devices_per_replica=2, sequence_axis=axis)


@pytest.mark.parametrize("make", [sg.MirroredStrategy, sg.MultiWorkerMirroredStrategy])
def test_replicas_of_one_device_are_refused(make) -> None:
    with pytest.raises(ValueError, match="for replicas of one device"):
        make(sequence_axis=1)


def test_axis_stays_with_copies_and_plans() -> None:
    strategy = strategy_of(2, 2)
    assert copy.deepcopy(strategy).sequence_axis == 1
    assert planned_strategy(parse_target("v5e:2x4"), strategy).sequence_axis == 1
    assert sg.MultiWorkerMirroredStrategy(devices_per_replica=4, sequence_axis=2).sequence_axis == 2
    assert sg.MirroredStrategy(["cpu:0", "cpu:1"]).sequence_axis is None
