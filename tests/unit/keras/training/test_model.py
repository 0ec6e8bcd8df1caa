"""Which strategy a model belongs to, where its methods may be called, and how they run."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.variables.registry import VariableKind
from tests.parity.comparison import (
    Scope,
    differences,
    evaluated,
    fitted,
    mirrored,
    plain_keras,
    regression,
)
from tests.unit.keras.replicas import kind_of, values_of
from tests.unit.keras.training.small_decoder import DEVICES, STRATEGIES, Sampler

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
            assert model.distribute_strategy is strategy
        assert model.distribute_strategy is strategy


def test_model_of_no_strategy_has_the_default_one() -> None:
    assert _model().distribute_strategy is sg.get_strategy()
    assert not sg.has_strategy()


def test_model_without_variables_has_the_strategy_around_it() -> None:
    model, strategy = keras.Sequential(), mirrored(2)
    assert model.distribute_strategy is sg.get_strategy()
    with strategy.scope():
        assert model.distribute_strategy is strategy


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


def test_model_made_outside_and_compiled_inside_is_refused_everywhere() -> None:
    model = _model(_dense("made_outside"))
    with mirrored(2).scope():
        model.compile(**_COMPILE)
    with pytest.raises(ValueError, match="'made_outside/kernel' was created outside the scope"):
        model.fit(*regression(), verbose=0)


def test_model_of_two_strategies_is_refused() -> None:
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


@pytest.mark.compatibility
def test_optimizer_of_another_strategy_is_refused() -> None:
    with mirrored(2).scope():
        model = _model()
    with mirrored(3).scope():
        optimizer = keras.optimizers.SGD(name="foreign")
    model.compile(optimizer=optimizer, loss="mse")
    with pytest.raises(ValueError, match="'foreign/iteration' was created under MirroredStrategy"):
        model.fit(*regression(), verbose=0)


def test_model_of_one_strategy_in_the_scope_of_another_is_refused() -> None:
    with mirrored(2).scope():
        model = _model()
        model.compile(**_COMPILE)
    with mirrored(3).scope(), pytest.raises(RuntimeError, match="scope"):
        model.fit(*regression(), verbose=0)
    assert not sg.has_strategy()


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


# Where the model is made, filled and compiled; it is always trained outside the scope.
def _filled_in_the_scope(scope: Scope) -> Any:
    model = keras.Sequential()
    with scope():
        model.add(keras.Input((3,)))
        model.add(keras.layers.Dense(1, kernel_initializer="ones"))
        model.compile(**_COMPILE)
    return model


def _built_by_fit(scope: Scope) -> Any:
    with scope():
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(**_COMPILE)
    assert not model.variables
    return model


class _Late(keras.Model):
    """Makes its layers in `build`, and a variable of its own in the first call."""

    def build(self, input_shape: Any) -> None:
        self.dense = keras.layers.Dense(1, kernel_initializer="ones")
        self.dense.build(input_shape)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs) * self.scale


def _subclassed(scope: Scope) -> Any:
    with scope():
        model = _Late()
        model.compile(**_COMPILE)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("make", [_filled_in_the_scope, _built_by_fit, _subclassed])
def test_model_built_late_follows_the_strategy(make: Callable[[Scope], Any]) -> None:
    def job(scope: Scope) -> dict[str, Any]:
        model = make(scope)
        measured = fitted(model, *regression(), batch_size=4)
        return measured | {"predict": model.predict(regression()[0], batch_size=4, verbose=0)}

    strategy = mirrored(2)
    made: list[Any] = []

    def distributed_job(_: Scope) -> dict[str, Any]:
        measured = job(strategy.scope)
        made.extend(strategy.variables.live())
        return measured

    expected = plain_keras(job)
    assert differences(plain_keras(distributed_job), expected) == []
    assert {kind_of(variable) for variable in made} >= {VariableKind.MIRRORED}


def _every_method(scope: Scope, **compile_arguments: Any) -> dict[str, Any]:
    x, y = regression()
    with scope():
        model = _model()
        model.compile(
            optimizer=keras.optimizers.SGD(0.05, momentum=0.9),
            loss="mse",
            metrics=["mae"],
            **compile_arguments,
        )
    measured = fitted(model, x, y, batch_size=6, epochs=1, validation_data=(x[:3], y[:3]))
    measured |= evaluated(model, x, y, batch_size=6)
    return measured | {
        "predict": model.predict(x, batch_size=6, verbose=0),
        "train_on_batch": model.train_on_batch(x[:5], y[:5]),
        "test_on_batch": model.test_on_batch(x[:5], y[:5]),
        "predict_on_batch": model.predict_on_batch(x[:5]),
        "kernel": values_of(model.trainable_variables)[0],
    }


def _in_scope(num_replicas: int) -> Scope:
    return mirrored(num_replicas).scope


@pytest.fixture(scope="module")
def one_device() -> dict[str, np.ndarray]:
    """What every method measures in plain Keras."""
    return plain_keras(_every_method)


@pytest.mark.compatibility
@pytest.mark.parametrize(
    "way",
    [
        pytest.param("run_eagerly", marks=pytest.mark.slow),
        "inside the scope",
        pytest.param("several steps", marks=pytest.mark.slow),
    ],
)
def test_every_method_gives_the_numbers_of_one_device(
    way: str, one_device: dict[str, np.ndarray]
) -> None:
    if way == "run_eagerly":
        measured = plain_keras(lambda _: _every_method(_in_scope(2), run_eagerly=True))
    elif way == "several steps":
        measured = plain_keras(lambda _: _every_method(_in_scope(3), steps_per_execution=4))
    else:
        with mirrored(3).scope():
            measured = plain_keras(lambda _: _every_method(contextlib.nullcontext))
    assert differences(measured, one_device) == []


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
        with mirrored(2).scope():
            model = keras.Sequential([keras.Input((3,)), Looks()])
            model.compile(loss="mse", run_eagerly=way == "compile")
        seen.clear()
        model.predict(x, verbose=0)
    finally:
        sg.config.run_eagerly(False)
    np.testing.assert_allclose(seen, [x[0, 0], x[2, 0]])


def test_batch_size_in_the_input_is_the_global_one() -> None:
    x, y = regression(8)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,), batch_size=4), keras.layers.Dense(1)])
        model.compile(**_COMPILE)
    assert len(model.fit(x, y, batch_size=4, verbose=0).history["loss"]) == 1
    assert model.predict(x, batch_size=4, verbose=0).shape == (8, 1)


def test_variables_are_checked_once_a_fit_and_not_in_each_epoch(monkeypatch) -> None:
    module = importlib.import_module("stratagem.keras.training.model")
    checked: list[Any] = []
    original = module.home_of
    monkeypatch.setattr(module, "home_of", lambda one: checked.append(one) or original(one))
    x, y = regression()
    with mirrored(2).scope():
        model = _model()
        model.compile(**_COMPILE)
    counts = []
    for num_epochs in (1, 1, 4):  # the first builds the model and the optimizer
        checked.clear()
        model.fit(x, y, batch_size=4, epochs=num_epochs, verbose=0)
        counts.append(len(checked))
    assert counts[1] == counts[2] > 0


# Generation with weights that stay on the devices that store them.

_VOCABULARY_SIZE, _WIDTH, _LENGTH = 32, 64, 2


class _Decoder(keras.Model):
    """Generates the next token from the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = keras.layers.Embedding(_VOCABULARY_SIZE, _WIDTH, name="tokens")
        self.hidden = keras.layers.Dense(_WIDTH, "tanh", name="hidden")
        self.scale = keras.Variable(
            1.0, trainable=False, synchronization="on_read", aggregation="mean", name="scale"
        )
        self.output_layer = keras.layers.Dense(_VOCABULARY_SIZE, name="output")
        self.sampler = Sampler(3)  # whose seeds are not layers' variables
        self.generate_function: Any = None
        self.received: list[Any] = []

    def call(self, tokens: Any) -> Any:
        return self.output_layer(self.hidden(self.embedding(tokens)) * self.scale)

    def generate_step(self, inputs: Any, stop_token_ids: Any) -> Any:
        assert stop_token_ids is None or isinstance(stop_token_ids, tuple)
        tokens = [inputs["token_ids"][:, :1]]
        for _ in range(_LENGTH):
            shape = (*tokens[-1].shape, _VOCABULARY_SIZE)
            noise = keras.random.normal(shape, seed=self.sampler.seeds)
            tokens.append(ops.argmax(self(tokens[-1]) + noise, axis=-1))
        return {"token_ids": ops.concatenate(tokens, axis=1)}

    def make_generate_function(self) -> Any:
        """As in KerasHub, shortened."""
        if self.generate_function is not None:
            return self.generate_function
        if self.run_eagerly:
            self.generate_function = self.generate_step
            return self.generate_function

        def compiled(inputs: Any, stop_token_ids: Any, state: Any) -> Any:
            variables = [*self.sampler.variables, *self._read()]
            with keras.StatelessScope(zip(variables, state, strict=True)) as scope:
                outputs = self.generate_step(inputs, stop_token_ids)
            return outputs, [scope.get_current_value(one) for one in self.sampler.variables]

        program = jax.jit(compiled, static_argnames=["stop_token_ids"])

        def generate(inputs: Any, stop_token_ids: Any = None) -> Any:
            self.received = [one.value for one in self._read()]
            state = [*(one.value for one in self.sampler.variables), *self.received]
            inputs = keras.tree.map_structure(ops.convert_to_tensor, inputs)
            outputs, seeds = program(inputs, stop_token_ids, state)
            for variable, seed in zip(self.sampler.variables, seeds, strict=True):
                variable.assign(seed)
            return outputs

        self.generate_function = generate
        return generate

    def _read(self) -> list[Any]:
        return [*self.trainable_variables, *self.non_trainable_variables]

    def generate(self, tokens: Any) -> Any:
        outputs = self.make_generate_function()({"token_ids": tokens}, stop_token_ids=None)
        return np.asarray(outputs["token_ids"])


class _OwnFunction(_Decoder):
    """Makes its function from that of its base class."""

    def make_generate_function(self) -> Any:
        return super().make_generate_function()


def _prompts(num_rows: int = 8) -> np.ndarray:
    return np.random.default_rng(1).integers(0, _VOCABULARY_SIZE, (num_rows, 4)).astype("int32")


def _made(strategy: Any = None, cls: type[_Decoder] = _Decoder) -> Any:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = cls()
        model(np.zeros((1, 4), "int32"))
    random = np.random.default_rng(5)
    model.set_weights([random.normal(1, 0.5, one.shape).astype(one.dtype) for one in model.weights])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def _generated(model: Any) -> list[np.ndarray]:
    """Generates twice, as seeds change, and with other weights."""
    results = [model.generate(_prompts()) for _ in range(2)]
    model.output_layer.kernel.assign(-np.asarray(model.output_layer.kernel))
    return [*results, model.generate(_prompts())]


@functools.cache
def _expected() -> list[np.ndarray]:
    return _generated(_made())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "mirrored" else pytest.mark.slow)
        for name in STRATEGIES
    ],
)
def test_tokens_equal_those_without_a_strategy(name: str) -> None:
    tokens = _generated(_made(STRATEGIES[name]()))
    assert all(map(np.array_equal, tokens, _expected()))
    assert len({each.tobytes() for each in tokens}) == 3


@pytest.mark.parametrize("name", ["mirrored", "sharded"])
def test_program_gets_the_arrays_that_variables_hold(name: str) -> None:
    model = _made(STRATEGIES[name](), _OwnFunction)
    model.generate(_prompts())
    read = [*model.trainable_variables, *model.non_trainable_variables]
    same = [one is variable.stored for one, variable in zip(model.received, read, strict=True)]
    assert same == [kind_of(variable) is not VariableKind.ON_READ for variable in read]
    assert all(len(one.devices()) == len(DEVICES) for one in model.received)
    assert all(len(variable.value.devices()) == 1 for variable in read)


@pytest.mark.slow
def test_calls_of_one_shape_compile_once() -> None:
    model = _made(STRATEGIES["sharded"]())
    before = model.generate(_prompts())
    model.fit(_prompts(), _prompts(), batch_size=8, verbose=0)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event)
    )
    after = [model.generate(_prompts()) for _ in range(2)]
    assert compiled == []
    assert not any(np.array_equal(before, one) for one in after)
    model.generate(_prompts(3))  # computed by all replicas alike
    assert any("compile" in event for event in compiled)


@pytest.mark.parametrize("kind", ["one row", "host", pytest.param("eager", marks=pytest.mark.slow)])
def test_other_models_read_their_weights_on_one_device(kind: str) -> None:
    strategies = {
        "host": lambda: sg.CentralStorageStrategy(DEVICES, parameter_device="cpu:7"),
    }
    model = _made(strategies.get(kind, STRATEGIES["mirrored"])())
    model.run_eagerly = kind == "eager"
    num_rows = 1 if kind == "one row" else 8
    tokens = model.generate(_prompts(num_rows))
    assert kind == "one row" or np.array_equal(tokens, _expected()[0])
    assert all(len(one.devices()) == 1 for one in model.received)
