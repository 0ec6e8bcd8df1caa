"""Generation with weights that stay on the devices that store them.

The model has the protocol of KerasHub's, which `validation/third_party` runs.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import keras
import numpy as np
import pytest
from keras import ops

import stratagem as sg
from stratagem.variables.registry import VariableKind
from tests.unit.keras.replicas import kind_of
from tests.unit.keras.training.small_decoder import DEVICES, STRATEGIES

_VOCABULARY_SIZE, _WIDTH, _LENGTH = 32, 64, 2


class _Sampler:
    """Adds noise to logits; its seeds are not layers' variables."""

    def __init__(self) -> None:
        self.seeds = keras.random.SeedGenerator(3)

    @property
    def variables(self) -> list[Any]:
        return [self.seeds.state]


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
        self.sampler = _Sampler()
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


@pytest.mark.parametrize("kind", ["one row", "host", "eager"])
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
