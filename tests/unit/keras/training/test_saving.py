"""Files of models: saved under a strategy, opened anywhere, and the other way round."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.input.batches import take_batch
from stratagem.input.placement import place
from stratagem.keras.training.generate_stream import generate_stepwise
from stratagem.keras.training.model import lower_training_step, observe_steps, restore_steps
from stratagem.observe.recorder import end_observation, observe
from stratagem.strategies.mirrored import CompileOnlyStrategy
from stratagem.variables.registry import VariableKind
from tests.fresh_process import run_fresh
from tests.marks import slow
from tests.parity.comparison import mirrored, regression
from tests.unit.keras.replicas import copies_of, kind_of, values_of
from tests.unit.keras.training.small_decoder import STRATEGIES, Letters, Sampler, made


def _trained(scope: Callable[[], Any] = contextlib.nullcontext) -> Any:
    """A model with every kind of state: weights, moving statistics, seeds, slots, a loss scale."""
    x, y = regression()
    layers = keras.layers
    with scope():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(4)])
        model.add(layers.BatchNormalization(momentum=0.5))
        model.add(layers.Dropout(0.3, seed=2))
        model.add(layers.Dense(1))
        model.compile(optimizer=keras.optimizers.Adam(0.05), loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0)
    return model


def _state(model: Any) -> list[np.ndarray]:
    return values_of([*model.weights, *model.optimizer.variables])


@pytest.fixture(scope="module")
def distributed() -> Any:
    """A model trained by two replicas."""
    return _trained(lambda: mirrored(2).scope())


_PLAIN_KERAS = """
import sys
import keras, numpy
model = keras.models.load_model("model.keras")
assert not [name for name in sys.modules if name.partition(".")[0] == "stratagem"]
variables = [*model.weights, *model.optimizer.variables]
arrays = {"variable" + str(i): numpy.asarray(v.value) for i, v in enumerate(variables)}
weights = keras.models.clone_model(model)
weights.load_weights("model.weights.h5")
for v, w in zip(model.weights, weights.weights, strict=True):
    numpy.testing.assert_array_equal(numpy.asarray(v.value), numpy.asarray(w.value))
numpy.savez("read.npz", **arrays)
"""


@pytest.mark.slow
def test_file_saved_under_a_strategy_opens_in_plain_keras(distributed: Any, tmp_path: Path) -> None:
    distributed.save(tmp_path / "model.keras")
    distributed.save_weights(tmp_path / "model.weights.h5")
    run_fresh(_PLAIN_KERAS, folder=tmp_path, KERAS_BACKEND="jax")
    with np.load(tmp_path / "read.npz") as read:
        for index, value in enumerate(_state(distributed)):
            np.testing.assert_array_equal(read[f"variable{index}"], value)


@pytest.mark.parametrize("shard_state", [None, "all"])
def test_weights_in_several_files_are_all_read(shard_state: Any, tmp_path: Path) -> None:
    def made(strategy: Any) -> Any:
        with strategy.scope():
            return keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64) for _ in "abc")])

    sharded = sg.MirroredStrategy(["cpu:0", "cpu:1"], shard_state=shard_state)
    path = tmp_path / "model.weights.json"
    for saver, reader in [(sharded, mirrored(3)), (mirrored(3), sharded)]:
        saved, read = made(saver), made(reader)
        saved.save_weights(path, max_shard_size=20 * 2**10 / 2**30)  # one of three layers each
        assert len(list(tmp_path.glob("model_*.weights.h5"))) == 3
        read.load_weights(path)
        for value, wanted in zip(read.weights, saved.weights, strict=True):
            np.testing.assert_array_equal(value.numpy(), wanted.numpy())


@pytest.mark.compatibility
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_file_opens_in_the_scope_of_any_strategy(num_replicas, distributed, tmp_path) -> None:
    distributed.save(tmp_path / "model.keras")
    strategy = mirrored(num_replicas)
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    assert loaded.distribute_strategy is strategy
    for value, wanted in zip(_state(loaded), _state(distributed), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    kinds = {variable.name: kind_of(variable) for variable in loaded.weights}
    assert kinds["kernel"] is VariableKind.MIRRORED
    assert kinds["moving_mean"] is VariableKind.ON_READ
    assert len(copies_of(loaded.optimizer.variables[-1])) == num_replicas


@pytest.mark.compatibility
def test_weights_set_and_got_are_those_of_one_device(distributed: Any, tmp_path: Path) -> None:
    """They go to every copy and component, and statistics are saved as the mean of components."""
    distributed.save_weights(tmp_path / "model.weights.h5")
    plain = keras.models.clone_model(distributed)
    plain.load_weights(tmp_path / "model.weights.h5")
    components = np.asarray(distributed.layers[1].moving_mean.storage)
    assert (components[0] != components[1]).any()
    np.testing.assert_allclose(
        np.asarray(plain.layers[1].moving_mean.value), components.mean(0), rtol=1e-6
    )
    assert all(kind_of(variable) is None for variable in plain.variables)
    with mirrored(3).scope():
        other, third = (keras.models.clone_model(distributed) for _ in range(2))
    assert other.distribute_strategy.num_replicas_in_sync == 3
    other.load_weights(tmp_path / "model.weights.h5")
    third.set_weights(distributed.get_weights())
    for model in (other, third):  # every copy and component
        for variable, wanted in zip(model.weights, values_of(distributed.weights), strict=True):
            for copy in copies_of(variable):
                np.testing.assert_allclose(copy.reshape(wanted.shape), wanted, rtol=1e-6)


# Tokens and texts while they are generated, beside those of `generate`.

_STRATEGIES: dict[str, Callable[[], Any]] = {"none": lambda: None, **STRATEGIES}
_TEXTS = ["ab", "cde", "fghi", "jk"]


def _sampling(model: Any, sampler: Any) -> Any:
    """Returns the model with another sampler, as `compile` of KerasHub sets it."""
    model.sampler, model.generate_function = sampler, None
    return model


def _prompts() -> dict[str, np.ndarray]:
    return Letters().generate_preprocess(_TEXTS, 12)


def _joined(columns: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    pieces = list(columns)
    return {name: np.concatenate([one[name] for one in pieces], axis=1) for name in pieces[0]}


@pytest.mark.parametrize(
    ("name", "seed"),
    [("both", 7), slow("none", None), *(slow(name, 7) for name in _STRATEGIES if name != "both")],
)
def test_tokens_equal_those_of_generate(name: str, seed: int | None) -> None:
    model = _sampling(made(_STRATEGIES[name]()), Sampler(seed))
    expected = [model.generate(_prompts(), stop_token_ids=None) for _ in range(2)]
    _sampling(model, Sampler(seed))
    for count, whole in zip((1, 4), expected, strict=True):
        stream = sg.generate_stream(
            model, _prompts(), stop_token_ids=None, tokens_per_execution=count
        )
        joined = _joined(stream)
        assert joined.keys() == whole.keys()
        assert joined["token_ids"].shape == (4, 10)  # the shortest prompt has two tokens
        assert all(np.array_equal(joined[key], whole[key][:, 2:]) for key in whole)


@pytest.mark.parametrize("inputs", [_TEXTS, slow("abc")])
def test_texts_joined_equal_that_of_generate(inputs: Any) -> None:
    stops = tuple(range(4, 14))
    model = _sampling(made(preprocessor=Letters()), Sampler(3))
    expected = model.generate(inputs, max_length=40, stop_token_ids=stops, strip_prompt=True)
    _sampling(model, Sampler(3))
    texts = list(sg.generate_stream(model, inputs, max_length=40, stop_token_ids=stops))
    if isinstance(inputs, str):
        assert "".join(texts) == expected
    else:
        assert ["".join(row) for row in zip(*texts, strict=True)] == expected
    assert 2 < len(texts) < 37


@pytest.mark.parametrize("stops", [None, tuple(range(1, 32))])
def test_columns_follow_each_other_up_to_the_end(stops: tuple[int, ...] | None) -> None:
    model = made()
    prompts = Letters().generate_preprocess(["abc", "a"], 8)
    whole = model.generate(prompts, stop_token_ids=stops)
    pieces = list(generate_stepwise(model, prompts, stops, 3))
    # With every token but padding a stop, both rows are done after the fourth column.
    ends = [4, 7, 8] if stops is None else [4]
    assert [(one.start, one.end) for one in pieces] == list(zip([1, *ends[:-1]], ends, strict=True))
    assert np.array_equal(pieces[-1].token_ids, whole["token_ids"])
    assert np.array_equal(pieces[-1].padding_mask, whole["padding_mask"])
    full = Letters().generate_preprocess(["abc", "abe"], 3)
    assert list(generate_stepwise(model, full, None, 1)) == []


def test_characters_of_several_tokens_come_whole() -> None:
    model = made(preprocessor=Letters())
    tokens = np.array([2, 3, 4, 2, 3, 3, 2], "int32")  # "éaé", and two halves alone
    model.hidden.set_weights([np.zeros((64, 64)), np.zeros(64)])

    class Written(Sampler):
        def __call__(self, next: Any, prompt: Any, cache: Any, index: Any, *more: Any) -> Any:
            def write(prompt: Any, cache: Any, index: Any) -> Any:
                logits = 10 * jax.nn.one_hot(jax.numpy.asarray(tokens)[index - 1], 32)
                return logits[None], next(prompt, cache, index)[1]

            return super().__call__(write, prompt, cache, index, *more)

    _sampling(model, Written())
    texts = list(sg.generate_stream(model, "z", max_length=8))
    assert texts == ["é", "a", "é", "\N{REPLACEMENT CHARACTER}" * 2]
    assert "".join(texts) == model.generate("z", max_length=8, strip_prompt=True)


def test_calls_of_one_shape_compile_once_and_weights_stay_in_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = made(_STRATEGIES["both"]())
    before = list(sg.generate_stream(model, _prompts(), stop_token_ids=None))
    model.output_layer.kernel.assign(-np.asarray(model.output_layer.kernel))
    traced = list(model.traced)
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(event)
    )
    for count in (1, 3):
        stream = sg.generate_stream(
            model, _prompts(), stop_token_ids=None, tokens_per_execution=count
        )
        after = _joined(stream)
    assert compiled == []
    assert model.traced == traced
    assert len(traced) == 2
    assert not np.array_equal(after["token_ids"], _joined(iter(before))["token_ids"])


def test_stopping_early_ends_the_work() -> None:
    model = _sampling(made(), Sampler(3))
    seeds = [np.asarray(model.sampler.seeds.state)[1]]
    for _ in sg.generate_stream(model, _prompts(), stop_token_ids=None):
        seeds.append(np.asarray(model.sampler.seeds.state)[1])
        if len(seeds) == 4:
            break
    assert np.asarray(model.sampler.seeds.state)[1] == seeds[-1]
    assert len({*map(int, seeds)}) == 4


def test_other_models_and_samplers_raise_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made()
    call = model.output_layer.call
    model.output_layer.call = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):  # of the loop
        list(sg.generate_stream(model, _prompts()))
    assert "run_loop" not in vars(model.sampler)
    model.output_layer.call = call
    with pytest.raises(TypeError, match="Sequential, which has no sampler"):
        sg.generate_stream(keras.Sequential(), "a")
    with pytest.raises(ValueError, match="tokens_per_execution=0"):
        sg.generate_stream(model, _prompts(), tokens_per_execution=0)
    with pytest.raises(ValueError, match="keeps several sequences for a prompt"):
        next(iter(sg.generate_stream(_sampling(model, Sampler(num_beams=2)), _prompts())))
    with pytest.raises(TypeError, match="samples by function"):
        sg.generate_stream(_sampling(model, lambda *_: None), _prompts())
    _sampling(model, Sampler()).generate_step = lambda inputs, stop_token_ids: inputs
    with pytest.raises(ValueError, match="calls run_loop 0 times"):
        next(iter(sg.generate_stream(model, _prompts())))
    model.generate_step = lambda inputs, stop_token_ids: inputs["token_ids"]
    with pytest.raises(ValueError, match="has a generate_step without 'token_ids'"):
        next(iter(sg.generate_stream(model, _prompts())))
    model = made(_STRATEGIES["mirrored"]())
    generate = model.generate
    model.generate = lambda *inputs, **options: [generate(*inputs, **options) for _ in range(2)]
    with pytest.raises(ValueError, match="received 2 batches"):
        sg.generate_stream(model, _prompts())
    several = SimpleNamespace(topology=SimpleNamespace(spans_processes=True))
    home = SimpleNamespace(strategy=several)
    monkeypatch.setattr("stratagem.keras.training.generate_stream.home_of", lambda variable: home)
    with pytest.raises(NotImplementedError, match="a model of several processes"):
        sg.generate_stream(model, _prompts())


# Training steps that are lowered, for devices that are here and for those that are not.

_IMAGES = jax.ShapeDtypeStruct((16, 6, 6, 1), "float32")
BATCH = (_IMAGES, jax.ShapeDtypeStruct((16,), "int64"))


def compiled_model(strategy: sg.Strategy) -> Any:
    """A model with every kind of variable: of layers, statistics, seeds, slots and metrics."""
    keras.backend.clear_session(free_memory=False)
    layers = keras.layers
    with strategy.scope():
        model = keras.Sequential([layers.Conv2D(4, 3, activation="relu")])
        for layer in (layers.BatchNormalization(), layers.Flatten(), layers.Dropout(0.5)):
            model.add(layer)
        model.add(layers.Dense(10))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    return model


def text_of(step: Any) -> str:
    """A program without what it is called."""
    return re.sub(r"module @\S+", "", step.as_text())


@pytest.mark.slow
@pytest.mark.parametrize(("num_devices", "num_steps"), [(4, 3), (1, 1)])
def test_devices_that_are_not_here_get_the_program_of_those_that_are(
    num_devices, num_steps
) -> None:
    devices = jax.devices()[:num_devices]
    here = compiled_model(sg.MirroredStrategy(devices))
    absent = compiled_model(CompileOnlyStrategy(devices))
    wanted = text_of(lower_training_step(here, BATCH, num_steps=num_steps))
    assert text_of(lower_training_step(absent, BATCH, num_steps=num_steps)) == wanted


def test_lowered_program_is_the_one_that_fit_runs() -> None:
    strategy = sg.MirroredStrategy(jax.devices()[:2])
    model = compiled_model(strategy)
    images, labels = np.ones((16, 6, 6, 1), "float32"), np.zeros(16, "int32")
    model.fit(images, labels, batch_size=16, verbose=0)
    (program,) = model.train_function._execution._programs.values()
    arguments = batch_arguments(place([take_batch((images, labels), 2)], strategy.topology))
    step = lower_training_step(model, (images, labels))
    assert len(program.trace.written) > 20  # of layers, the optimizer and metrics
    assert text_of(step) == text_of(program.lower(arguments))


def test_variables_have_shapes_and_no_values() -> None:
    model = compiled_model(CompileOnlyStrategy(jax.devices()[:4]))
    lower_training_step(model, BATCH)
    assert {kind_of(one) for one in model.metrics_variables} == {VariableKind.ON_READ}
    for variable in [*model.variables, *model.optimizer.variables]:
        assert isinstance(variable.storage, jax.ShapeDtypeStruct)
        stacked = (4,) if kind_of(variable) is VariableKind.ON_READ else ()
        assert variable.storage.shape == (*stacked, *variable.shape)
        assert variable.storage.dtype == variable.dtype


def test_model_of_no_strategy_is_moved_by_compile() -> None:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    kernel = np.asarray(model.layers[0].kernel.value)
    model.compile(loss="mse")
    with pytest.raises(ValueError, match="belongs to no strategy"):
        lower_training_step(model, BATCH)
    sg.compile(model, distribute=CompileOnlyStrategy(jax.devices()[:2]), loss="mse")
    shape = jax.ShapeDtypeStruct((4, 3), "float32"), jax.ShapeDtypeStruct((4, 2), "float32")
    assert "all_reduce" in lower_training_step(model, shape).as_text()
    assert isinstance(model.layers[0].kernel.storage, jax.ShapeDtypeStruct)
    variable = model.layers[0].kernel
    variable.assign(0 * kernel)  # dropped
    np.testing.assert_array_equal(np.asarray(variable.value), kernel)


@pytest.mark.parametrize("sizes", [(15, 15), (16, 8), (0, 0)])
def test_batch_that_replicas_cannot_share_evenly_is_refused(sizes) -> None:
    model = compiled_model(CompileOnlyStrategy(jax.devices()[:4]))
    images = jax.ShapeDtypeStruct((sizes[0], 6, 6, 1), "float32")
    labels = jax.ShapeDtypeStruct((sizes[1],), "int32")
    with pytest.raises(ValueError, match="over 4 replicas"):
        lower_training_step(model, (images, labels))


# Train functions of Keras that notify an observer.


class Observer:
    def __init__(self) -> None:
        self.notes: list[object] = []

    @contextlib.contextmanager
    def step(self, num_steps, results):
        yield
        self.notes.append((num_steps, results()))

    def end_if_done(self) -> None:
        pass


@pytest.fixture
def observer():
    made = Observer()
    observe(made)
    yield made
    end_observation(made)


def _model() -> SimpleNamespace:
    def train(state, iterator):
        return {"loss": sum(iterator)}, (*state, "trained")

    return SimpleNamespace(train_function=train, steps_per_execution=3)


def test_steps_are_noted_with_their_logs(observer) -> None:
    observe_steps(SimpleNamespace(train_function=None))  # not compiled yet
    model = _model()
    original = model.train_function
    observe_steps(model)
    observe_steps(model)  # once is enough
    assert model.train_function(("a",), iter([1, 2, 4])) == ({"loss": 7}, ("a", "trained"))
    assert observer.notes == [(3, {"loss": 7})]
    end_observation(observer)
    model.train_function((), iter([]))
    assert len(observer.notes) == 1
    restore_steps(model)
    restore_steps(model)
    observe_steps(model)  # without an observer
    assert model.train_function is original
