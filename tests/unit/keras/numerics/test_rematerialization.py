"""`keras.RematScope` with layers that take static arguments and write state, and its steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
import stratagem.keras
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations, fitted

_SCOPES: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "one": lambda: sg.OneDeviceStrategy("cpu:0").scope(),
    "two": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope(),
    "sharded": lambda: sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope(),
}

_MODES: dict[str, dict[str, Any]] = {
    "full": {"mode": "full"},
    "activations": {"mode": "activations"},
    "larger_than": {"mode": "larger_than", "output_size_threshold": 8},
    "list_of_layers": {"mode": "list_of_layers", "layer_names": ["block_1"]},
}


@functools.cache
def _reference(scope: str) -> Any:
    return fitted(_SCOPES[scope]())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scope", "mode"),
    [
        ("plain", "full"),
        ("plain", "list_of_layers"),
        ("one", "larger_than"),
        ("two", "full"),
        ("two", "activations"),
        ("sharded", "full"),
    ],
)
def test_fit_in_a_remat_scope_equals_fit_without(scope: str, mode: str) -> None:
    with keras.RematScope(**_MODES[mode]):
        losses, weights = fitted(_SCOPES[scope]())
    expected_losses, expected = _reference(scope)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5)


def _num_recomputed(model: Any) -> int:
    """Returns the number of calls that a gradient computes again."""
    trainable = [one.value for one in model.trainable_variables]
    others = [one.value for one in model.non_trainable_variables]

    def loss(values: Any) -> Any:
        outputs, _ = model.stateless_call(values, others, jnp.ones((2, 4)), training=True)
        return outputs.sum()

    return len(equations(jax.make_jaxpr(jax.grad(loss))(trainable).jaxpr, "remat2"))


@pytest.mark.slow
def test_each_layer_is_recomputed_once_and_as_a_whole() -> None:
    with keras.RematScope(mode="full"):
        model = decoder()
    assert _num_recomputed(model) == 3  # two blocks, and Dense
    with keras.RematScope(mode="larger_than", output_size_threshold=10**6):
        model = decoder()
    assert _num_recomputed(model) == 0
    with keras.RematScope(mode="larger_than", output_size_threshold=7):
        model = decoder()
    assert _num_recomputed(model) == 2  # Dense has two results


def test_an_inner_layer_is_recomputed_if_it_asks() -> None:
    model = decoder()
    sg.remat(model)
    assert _num_recomputed(model) == 2
    sg.remat(model, layers="inner_0")
    assert _num_recomputed(model) > 2


def test_an_embedding_keeps_gradients_of_rows() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    with strategy.scope(), keras.RematScope(mode="full"):
        embedding = keras.layers.Embedding(30_000, 4)
        dense = keras.layers.Dense(1)
        dense.build((None, 4))
        embedding.build(None)

    def step(ids: Any) -> Any:
        loss = lambda: jnp.sum(dense(embedding(ids)))  # noqa: E731
        _, (rows,) = sg.value_and_grad(loss, embedding.trainable_variables, sparse_gradients=True)
        assert isinstance(rows, sg.IndexedSlices)
        return rows.values

    assert strategy.run(step, args=(np.array([3, 4], "int32"),)).shape == (2, 4)


@pytest.mark.slow
def test_custom_loop_keeps_writes_and_losses_of_recomputed_layers() -> None:
    results = []
    for is_recomputed in (False, True):
        keras.utils.set_random_seed(0)
        strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        with strategy.scope():
            block: Any = Block(0)
            block.build((None, 4))
            block.norm.synchronized = True
        if is_recomputed:
            sg.remat(block, layers=[block])

        def step(x: Any, block: Any = block) -> Any:
            def loss() -> Any:
                value = jnp.mean(block(x, training=True) ** 2)
                assert len(block.losses) == 1
                return value + sg.scale_regularization_loss(block.losses)

            return sg.value_and_grad(loss, block.trainable_variables)

        x = np.random.default_rng(0).normal(size=(4, 4)).astype("float32")
        parts = strategy.experimental_distribute_values_from_function(
            lambda context, x=x: x[2 * context.replica_id_in_sync_group :][:2]
        )
        value, gradients = strategy.run(step, args=(parts,))
        assert float(block.calls.value) == 1
        totals = [strategy.reduce("SUM", one, axis=None) for one in (value, *gradients)]
        results.append([*totals, block.norm.moving_mean.value, block.seed_state])
    for own, expected in zip(*results, strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-5)


# Keras 3.16 says that a recurrent layer passes no mask on. No layer follows here.
@pytest.mark.compatibility
@pytest.mark.filterwarnings("ignore:Layer 'lstm' .*was passed an input with a mask:UserWarning")
def test_masks_pass_through_recomputed_layers() -> None:
    model = keras.Sequential([keras.layers.Masking(), keras.layers.Dense(3), keras.layers.LSTM(2)])
    model.build((None, 5, 4))
    x = np.random.default_rng(0).normal(size=(2, 5, 4)).astype("float32")
    x[0, 3:] = 0.0

    def call() -> Any:
        trainable = [one.value for one in model.trainable_variables]
        others = [one.value for one in model.non_trainable_variables]
        return jax.jit(lambda *state: model.stateless_call(*state, x)[0])(trainable, others)

    expected = call()
    sg.remat(model, layers="masking|dense|lstm")
    np.testing.assert_allclose(call(), expected, rtol=1e-6)


def test_function_with_static_arguments() -> None:
    def scaled(x: Any, kind: str, *, is_doubled: bool) -> Any:
        return {"y": jnp.sin(x) * (2.0 if is_doubled else 1.0), "kind": kind, "none": None}

    def loss(x: Any) -> Any:
        results = keras.remat(scaled)(x, "sine", is_doubled=True)
        assert results["kind"] == "sine"
        assert results["none"] is None
        return results["y"]

    jaxpr = jax.make_jaxpr(jax.grad(loss))(1.0)
    assert len(equations(jaxpr.jaxpr, "remat2")) == 1
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(1.0), 2 * np.cos(1.0), rtol=1e-6)


def test_eager_calls_are_plain() -> None:
    with keras.RematScope(mode="full"):
        dense = keras.layers.Dense(1)
    np.testing.assert_allclose(dense(np.zeros((1, 2), "float32")), np.zeros((1, 1)))


def test_summaries_of_recomputed_layers_are_written_once(tmp_path: Any) -> None:
    class Summarized(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            sg.summary.scalar("mean", jnp.mean(x), step=3)
            return x * 2

    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope(), keras.RematScope(mode="full"):
        layer = Summarized()

    def step(x: Any) -> Any:
        return sg.value_and_grad(lambda y: layer(y).sum(), x)

    writer = sg.summary.create_file_writer(str(tmp_path))
    with writer.as_default():
        strategy.run(step, args=(jnp.ones(2),))
    writer.close()
    assert len(list(tmp_path.iterdir())) == 1
    (path,) = tmp_path.iterdir()
    assert path.read_bytes().count(b"mean") == 1
