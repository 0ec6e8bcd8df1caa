"""Tokens and texts while they are generated, beside those of `generate`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg
from tests.unit.keras.training.small_decoder import STRATEGIES, Decoder, Letters, Sampler

_STRATEGIES: dict[str, Callable[[], Any]] = {"none": lambda: None, **STRATEGIES}
_TEXTS = ["ab", "cde", "fghi", "jk"]


def _made(strategy: Any = None, preprocessor: Any = None) -> Any:
    with contextlib.nullcontext() if strategy is None else strategy.scope():
        model = Decoder(preprocessor)
    random = np.random.default_rng(5)
    model.set_weights([random.normal(0, 0.5, one.shape).astype(one.dtype) for one in model.weights])
    return model


def _sampling(model: Any, sampler: Any) -> Any:
    """Returns the model with another sampler, as `compile` of KerasHub sets it."""
    model.sampler, model.generate_function = sampler, None
    return model


def _prompts() -> dict[str, np.ndarray]:
    return Letters().generate_preprocess(_TEXTS, 12)


def _joined(columns: Iterator[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    pieces = list(columns)
    return {name: np.concatenate([one[name] for one in pieces], axis=1) for name in pieces[0]}


@pytest.mark.parametrize("seed", [pytest.param(None, marks=pytest.mark.slow), 7])
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "both" else pytest.mark.slow) for name in _STRATEGIES],
)
def test_tokens_equal_those_of_generate(name: str, seed: int | None) -> None:
    model = _sampling(_made(_STRATEGIES[name]()), Sampler(seed))
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


@pytest.mark.parametrize("inputs", [_TEXTS, pytest.param("abc", marks=pytest.mark.slow)])
def test_texts_joined_equal_that_of_generate(inputs: Any) -> None:
    stops = tuple(range(4, 14))
    model = _sampling(_made(preprocessor=Letters()), Sampler(3))
    expected = model.generate(inputs, max_length=40, stop_token_ids=stops, strip_prompt=True)
    _sampling(model, Sampler(3))
    texts = list(sg.generate_stream(model, inputs, max_length=40, stop_token_ids=stops))
    if isinstance(inputs, str):
        assert "".join(texts) == expected
    else:
        assert ["".join(row) for row in zip(*texts, strict=True)] == expected
    assert 2 < len(texts) < 37


def test_characters_of_several_tokens_come_whole() -> None:
    model = _made(preprocessor=Letters())
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
    model = _made(_STRATEGIES["both"]())
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
    model = _sampling(_made(), Sampler(3))
    seeds = [np.asarray(model.sampler.seeds.state)[1]]
    for _ in sg.generate_stream(model, _prompts(), stop_token_ids=None):
        seeds.append(np.asarray(model.sampler.seeds.state)[1])
        if len(seeds) == 4:
            break
    assert np.asarray(model.sampler.seeds.state)[1] == seeds[-1]
    assert len({*map(int, seeds)}) == 4


def test_an_error_of_the_loop_reaches_the_caller() -> None:
    model = _made()

    def fail(*_: Any) -> Any:
        raise RuntimeError("no logits")

    model.output_layer.call = fail
    with pytest.raises(RuntimeError, match="no logits"):
        list(sg.generate_stream(model, _prompts()))
    assert "run_loop" not in vars(model.sampler)


def test_other_models_and_samplers_raise_errors() -> None:
    model = _made()
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


def test_several_batches_and_several_processes_raise_errors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _made(_STRATEGIES["mirrored"]())
    generate = model.generate
    model.generate = lambda *inputs, **options: [generate(*inputs, **options) for _ in range(2)]
    with pytest.raises(ValueError, match="received 2 batches"):
        sg.generate_stream(model, _prompts())
    several = SimpleNamespace(topology=SimpleNamespace(spans_processes=True))
    monkeypatch.setattr(
        "stratagem.keras.training.generate_stream.home_of",
        lambda variable: SimpleNamespace(strategy=several),
    )
    with pytest.raises(NotImplementedError, match="a model of several processes"):
        sg.generate_stream(model, _prompts())
