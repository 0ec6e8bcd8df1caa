"""`sg.scan_layers`: equal layers in one loop, with the results of single layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.keras.numerics.decoder_blocks import Block, decoder, equations, fitted


def _sharded() -> Any:
    return sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all").scope()


def _recomputed_scan(model: Any) -> None:
    sg.scan_layers(model)
    sg.remat(model)


@pytest.mark.parametrize(
    ("scope", "prepare"),
    [
        pytest.param(contextlib.nullcontext, sg.scan_layers, marks=pytest.mark.slow),
        (_sharded, _recomputed_scan),
    ],
    ids=["plain Keras", "sharded and rematerialized"],
)
def test_fit_equals_fit_of_single_layers(scope: Any, prepare: Callable[[Any], Any]) -> None:
    # Dropout, statistics, losses that layers add, and counters.
    losses, weights = fitted(scope(), prepare)
    expected_losses, expected = fitted(scope())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-6)
    for own, other in zip(weights, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-6)


def _num_scans(model: Any, call: Callable[[Any], Any] | None = None) -> int:
    jaxpr = jax.make_jaxpr(call or (lambda x: model(x)))(np.ones((2, 4), "float32"))
    return len(equations(jaxpr.jaxpr, "scan"))


def _blocks(model: Any) -> list[Any]:
    return [one for one in model.layers if isinstance(one, Block)]


def test_only_calls_of_the_model_are_scanned() -> None:
    model: Any = decoder()
    first, second = sg.scan_layers(model)
    assert [first, second] == _blocks(model)
    assert _num_scans(model) == 1
    assert _num_scans(model, lambda x: second(first(x))) == 0
    x = np.ones((2, 4), "float32")
    np.testing.assert_allclose(model(x), model.predict(x, verbose=0), rtol=1e-6)


@pytest.mark.slow
def test_layers_in_sequential_models_and_with_two_equal_arguments() -> None:
    tower = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4) for _ in range(3))])
    assert len(sg.scan_layers(tower, layers="dense")) == 3
    assert _num_scans(tower) == 1
    x = inputs = keras.Input((3, 4))
    for _ in range(2):
        x = keras.layers.MultiHeadAttention(1, 4)(x, x)
    model: Any = keras.Model(inputs, x)
    data = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    expected = model(data)
    sg.scan_layers(model)
    np.testing.assert_allclose(model.predict(data, verbose=0), expected, rtol=1e-5)


def _row(*layers: Any) -> Any:
    return keras.Sequential([keras.Input((4,)), *layers])


def test_layers_that_differ_are_refused() -> None:
    dense = keras.layers.Dense
    with pytest.raises(ValueError, match="differ in activation: 'linear' and 'relu'"):
        sg.scan_layers(_row(dense(4), dense(4, "relu")), layers="dense")
    with pytest.raises(ValueError, match="differ in units: 4 and 3"):
        sg.scan_layers(_row(dense(4), dense(3)), layers="dense")
    with pytest.raises(ValueError, match="differ in their classes, Dense and Dropout"):
        sg.scan_layers(row := _row(dense(4), keras.layers.Dropout(0.5)), layers=row.layers)
    frozen = dense(4)
    frozen.trainable = False
    with pytest.raises(ValueError, match="differ in trainable: True and False"):
        sg.scan_layers(_row(dense(4), frozen), layers="dense")
    model = decoder()
    _blocks(model)[1].dropout.rate = 0.25
    with pytest.raises(ValueError, match=r"'dropout.*', in .*rate: 0.5 and 0.25"):
        sg.scan_layers(model)


def test_layers_that_do_not_follow_each_other_are_refused() -> None:
    model = decoder()
    with pytest.raises(ValueError, match="'block_0', which is in no row of layers"):
        sg.scan_layers(model, layers="block_0")
    with pytest.raises(ValueError, match="nothing to scan"):
        sg.scan_layers(keras.layers.Dense(3))


def test_layers_that_one_loop_cannot_compute_are_refused() -> None:
    model = decoder()
    sg.scan_layers(model)
    sg.remat(model, layers="block_1")
    with pytest.raises(ValueError, match="only some are rematerialized"):
        _num_scans(model)
    regularized = [keras.layers.Dense(4, activity_regularizer="l2") for _ in range(2)]
    model = _row(*regularized)
    sg.scan_layers(model, layers="dense")
    with pytest.raises(ValueError, match="an activity regularizer"):
        _num_scans(model)


class _Odd(keras.layers.Layer):
    """A layer whose `effect` no loop can repeat."""

    def __init__(self, effect: Callable[[Any, Any], Any], shared: Any = None) -> None:
        super().__init__()
        self.effect, self.shared = effect, shared

    def call(self, x: Any) -> Any:
        return self.effect(self, x)


def _count(layer: Any, x: Any) -> Any:
    layer.shared.assign_add(1.0)
    return x


_OTHERS: dict[str, Any] = {}


def _count_other(x: Any) -> Any:
    _OTHERS["counter"].assign_add(1.0)
    return x


def _summarize(layer: Any, x: Any) -> Any:
    sg.summary.scalar("sum", keras.ops.sum(x))
    return x


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (_count, "that share .* and assign to it"),
        (lambda _, x: _count_other(x), "which is not its own"),
        (lambda _, x: keras.ops.cast(x, "float16"), "gets .* and returns .*float16"),
        (_summarize, "a layer that writes summaries"),
    ],
    ids=["shared", "global", "dtype", "summary"],
)
def test_effects_that_one_loop_cannot_have_are_refused(
    effect: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = keras.Variable(0.0, trainable=False)
    monkeypatch.setitem(_OTHERS, "counter", keras.Variable(0.0, trainable=False))
    model = _row(*(_Odd(effect, shared) for _ in range(2)))
    sg.scan_layers(model, layers="odd")

    def call(x: Any) -> Any:
        with keras.StatelessScope():
            return model(x)

    with pytest.raises(ValueError, match=message):
        _num_scans(model, call)


class _Shift(keras.layers.Layer):
    """A layer that moves the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.supports_masking = True

    def call(self, x: Any) -> Any:
        return keras.ops.roll(x, 1, axis=1)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return keras.ops.roll(previous_mask, 1, axis=1)


def test_masks_that_change_are_refused() -> None:
    inputs = keras.Input((4, 4))
    model: Any = keras.Model(inputs, _Shift()(_Shift()(keras.layers.Masking()(inputs))))
    sg.scan_layers(model, layers="shift")
    with pytest.raises(ValueError, match="another mask than its input"):
        jax.make_jaxpr(lambda x: model(x))(np.ones((2, 4, 4), "float32"))
