"""Which strategy a model belongs to, where its methods may be called, and how they run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.variables.registry import VariableKind
from tests.marks import slow
from tests.parity.comparison import (
    Scope,
    carried_out,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
    with_known_weights,
)
from tests.unit.keras.replicas import dense_model, kind_of, two
from tests.unit.keras.training.small_decoder import DEVICES, STRATEGIES, Decoder, made
from tests.unit.keras.training.test_own_steps import every_method

_COMPILE = {"optimizer": "sgd", "loss": "mse"}


def _dense(name: str = "dense", num_inputs: int = 3) -> Any:
    layer = keras.layers.Dense(1, kernel_initializer="ones", name=name)
    layer.build((None, num_inputs))
    return layer


def _model(layer: Any = None) -> Any:
    return keras.Sequential([keras.Input((3,)), layer or _dense()])


@pytest.mark.compatibility
def test_model_tells_the_strategy_under_which_its_variables_were_made() -> None:
    for strategy in (mirrored(2), sg.OneDeviceStrategy("cpu:1")):
        with strategy.scope():
            model = _model()
            assert model.distribute_strategy is keras.Sequential().distribute_strategy is strategy
        assert model.distribute_strategy is strategy
    assert _model().distribute_strategy is sg.get_strategy()
    assert not sg.has_strategy()


_CALLS: dict[str, Callable[[Any, np.ndarray, np.ndarray], Any]] = {
    "fit": lambda model, x, y: model.fit(x, y, verbose=0),
    "evaluate": lambda model, x, y: model.evaluate(x, y, verbose=0),
    "predict": lambda model, x, y: model.predict(x, verbose=0),
    "train_on_batch": lambda model, x, y: model.train_on_batch(x, y),
    "test_on_batch": lambda model, x, y: model.test_on_batch(x, y),
    "predict_on_batch": lambda model, x, y: model.predict_on_batch(x),
}


@pytest.mark.compatibility
@pytest.mark.parametrize("name", _CALLS)
def test_model_made_outside_is_refused_inside_with_its_first_variable(name: str) -> None:
    model = _model(_dense("made_outside"))
    model.compile(**_COMPILE)
    words = r"(?s)'made_outside/kernel' was created outside the scope.*with strategy\.scope\(\):"
    with mirrored(2).scope(), pytest.raises(ValueError, match=words):
        _CALLS[name](model, *regression())
    if name == "fit":  # outside, too
        with mirrored(2).scope():
            model.compile(**_COMPILE)
        words = "'made_outside/kernel' was created outside the scope"
        with pytest.raises(ValueError, match=words):
            model.fit(*regression(), verbose=0)


def test_model_or_optimizer_of_another_strategy_is_refused() -> None:
    with mirrored(2).scope():
        first = _dense("first")
    with mirrored(3).scope():
        second = _dense("second", num_inputs=1)
    model = keras.Sequential([keras.Input((3,)), first, second])
    model.compile(loss="mse")
    words = r"'second/kernel' was created under MirroredStrategy\(.*cpu:2\), but the model runs"
    with pytest.raises(ValueError, match=words):
        model.evaluate(*regression(), verbose=0)
    with pytest.raises(ValueError, match=words):
        _ = model.distribute_strategy
    with mirrored(2).scope():
        model = _model()
        model.compile(**_COMPILE)
    with mirrored(3).scope():
        with pytest.raises(RuntimeError, match="scope"):
            model.fit(*regression(), verbose=0)
        optimizer = keras.optimizers.SGD(name="foreign")
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="'foreign/iteration' was created under MirroredStrategy"):
        model.fit(*regression(), verbose=0)


@pytest.mark.compatibility
def test_error_in_fit_leaves_no_scope_open() -> None:
    class Fails(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            raise OSError("no space left")

    with mirrored(2).scope():
        model = _model()
        model.compile(**_COMPILE)
    with pytest.raises(OSError, match="no space left"):
        model.fit(*regression(), verbose=0, callbacks=[Fails()])
    assert not sg.has_strategy()
    assert len(model.fit(*regression(), verbose=0).history["loss"]) == 1


@pytest.mark.compatibility
def test_every_method_gives_the_numbers_of_one_device() -> None:
    job = every_method(keras.Model)
    with mirrored(3).scope():
        measured = plain_keras(lambda _: job(contextlib.nullcontext))
    assert differences(measured, plain_keras(job)) == []


@pytest.mark.parametrize("way", ["compile", "config"])
def test_layers_of_an_eager_model_see_values(way: str) -> None:
    seen: list[float] = []

    class Looks(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            if sg.get_replica_context() is not None and isinstance(inputs, jax.Array):
                seen.append(float(inputs[0, 0]))
            return inputs

    x, _ = regression(3)
    sg.config.run_eagerly(way == "config")
    try:
        model = dense_model(two, Looks(), run_eagerly=way == "compile")
        seen.clear()
        model.predict(x, verbose=0)
    finally:
        sg.config.run_eagerly(False)
    np.testing.assert_allclose(seen, [x[0, 0], x[2, 0]])


# Eager replicas without a row: each op then sees an array of no rows.


@pytest.mark.parametrize(
    ("kind", "reduction", "num_rows"),
    [
        ("masked", "sum_over_batch_size", 4),
        ("plain", "sum", 1),
        *(
            slow(kind, reduction, num_rows)
            for kind, reduction in [
                ("masked", "mean_with_sample_weight"),
                ("plain", "mean"),
                ("recurrent", "mean"),
            ]
            for num_rows in (5, 4, 1)
        ),
    ],
)
def test_eager_replicas_without_rows_change_no_number(kind, reduction, num_rows) -> None:
    """With masks, activity regularizers and weights; an op of such a replica gets no rows."""
    random = np.random.RandomState(num_rows)
    x = random.standard_normal((num_rows, 2, 3)).astype("float32")
    x[::3, 1] = 0  # masked
    y = random.randint(0, 3, (num_rows, 2))
    weights = random.uniform(0.2, 2.0, (num_rows, 2)).astype("float32")

    def job(scope: Scope, *, eager: bool = False) -> dict[str, Any]:
        with scope():
            last = keras.layers.Dense(3, activation="softmax", activity_regularizer="l2")
            before = [keras.layers.Masking()] if kind != "plain" else []
            if kind == "recurrent":
                before.append(keras.layers.GRU(2, return_sequences=True))
            model = keras.Sequential([keras.layers.Input((2, 3)), *before, last])
            model.compile(
                keras.optimizers.SGD(0.1),
                keras.losses.SparseCategoricalCrossentropy(reduction=reduction),
                metrics=["accuracy"],
                weighted_metrics=["accuracy"],
                run_eagerly=eager,
            )
        with_known_weights(model)
        data: Any = {"sample_weight": weights, "batch_size": num_rows}
        measured = fitted(model, x, y, epochs=1, **data) | evaluated(model, x, y, **data)
        return {**measured, "predict": model.predict(x, batch_size=num_rows, verbose=0)}

    eagerly = functools.partial(job, eager=True)
    assert differences(carried_out(eagerly, mirrored(3).scope), plain_keras(job)) == []


# Generation with weights that stay on the devices that store them.


class _OwnFunction(Decoder):
    """Makes its function from that of its base class."""

    def make_generate_function(self) -> Any:
        return super().make_generate_function()


def _tokens(model: Any, num_rows: int = 8) -> np.ndarray:
    """Three tokens after the first of each row."""
    tokens = np.random.default_rng(1).integers(4, 32, (num_rows, 4)).astype("int32")
    prompts = {"token_ids": tokens, "padding_mask": np.tile(np.arange(4) < 1, (num_rows, 1))}
    return model.generate(prompts, stop_token_ids=None)["token_ids"]


def _generated(model: Any) -> list[np.ndarray]:
    """Generates twice, as seeds change, and with other weights."""
    results = [_tokens(model) for _ in range(2)]
    model.output_layer.kernel.assign(-np.asarray(model.output_layer.kernel))
    return [*results, _tokens(model)]


@functools.cache
def _expected() -> list[np.ndarray]:
    return _generated(made(seed=3))


@pytest.mark.parametrize("name", [n if n == "mirrored" else slow(n) for n in STRATEGIES])
def test_tokens_equal_those_without_a_strategy(name: str) -> None:
    tokens = _generated(made(STRATEGIES[name](), seed=3))
    assert all(map(np.array_equal, tokens, _expected()))
    assert len({each.tobytes() for each in tokens}) == 3


@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_program_gets_the_arrays_that_variables_hold(name: str) -> None:
    model = made(STRATEGIES[name](), kind=_OwnFunction)
    _tokens(model)
    read = [*model.trainable_variables, *model.non_trainable_variables]
    same = [one is variable.stored for one, variable in zip(model.received, read, strict=True)]
    assert same == [kind_of(variable) is not VariableKind.ON_READ for variable in read]
    assert all(len(one.devices()) == len(DEVICES) for one in model.received)
    assert all(len(variable.value.devices()) == 1 for variable in read)


@pytest.mark.slow
def test_calls_of_one_shape_compile_once() -> None:
    model = made(STRATEGIES["sharded"](), seed=3)
    before = _tokens(model)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(before, before, batch_size=8, verbose=0)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event)
    )
    after = [_tokens(model) for _ in range(2)]
    assert compiled == []
    assert not any(np.array_equal(before, one) for one in after)
    _tokens(model, 3)  # computed by all replicas alike
    assert any("compile" in event for event in compiled)


@pytest.mark.parametrize("kind", ["one row", "host", slow("eager")])
def test_other_models_read_their_weights_on_one_device(kind: str) -> None:
    is_host = kind == "host"
    central = sg.CentralStorageStrategy(DEVICES, parameter_device="cpu:7") if is_host else None
    model = made(central or STRATEGIES["mirrored"](), seed=3)
    model.run_eagerly = kind == "eager"
    tokens = _tokens(model, 1 if kind == "one row" else 8)
    assert kind == "one row" or np.array_equal(tokens, _expected()[0])
    assert all(len(one.devices()) == 1 for one in model.received)
