"""KerasHub's decoders stream the tokens and the text of `generate`, from weights in shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import keras_hub
import numpy as np
import pytest

import stratagem as sg
from validation.third_party.programs.keras_hub_layouts import layout_map
from validation.third_party.programs.keras_hub_sharded import compile_decoder, make_decoder

_LENGTH, _NUM_PROMPTS = 12, 8
_SAMPLERS: dict[str, Callable[[], Any]] = {
    "greedy": keras_hub.samplers.GreedySampler,
    "top_k": lambda: keras_hub.samplers.TopKSampler(5, seed=7),
}
_STRATEGIES: dict[str, Callable[[str], Any]] = {
    "all": lambda name: sg.MirroredStrategy(shard_state="all"),
    "layouts": lambda name: sg.MirroredStrategy(layout_map=layout_map(name, (2, 4))),
}
_QUICK = {("llama", "all", "top_k"), ("gemma", "layouts", "greedy")}
_ROWS = [
    pytest.param(*row, marks=() if row in _QUICK else pytest.mark.slow)
    for row in (
        (name, kind, one)
        for name in ("llama", "gemma")
        for kind in _STRATEGIES
        for one in _SAMPLERS
    )
]


def _prompts() -> dict[str, np.ndarray]:
    """Prompts of three to six tokens."""
    random = np.random.default_rng(1)
    mask = np.arange(_LENGTH) < random.integers(3, 7, _NUM_PROMPTS)[:, None]
    tokens = np.where(mask, random.integers(1, 64, mask.shape), 0)
    return {"token_ids": tokens.astype("int32"), "padding_mask": mask.astype("int32")}


def _sampling(model: Any, sampler: Any) -> Any:
    model.sampler, model.generate_function = sampler, None
    return model


@pytest.mark.parametrize(("name", "kind", "sampler"), _ROWS)
def test_tokens_equal_those_of_generate_and_compile_once(
    name: str, kind: str, sampler: str
) -> None:
    with _STRATEGIES[kind](name).scope():
        model = compile_decoder(make_decoder(name))
    stops = (5, 7, 11, 13)
    _sampling(model, _SAMPLERS[sampler]())
    expected = [model.generate(_prompts(), stop_token_ids=stops) for _ in range(2)]
    _sampling(model, _SAMPLERS[sampler]())
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: events.append(event)
    )
    pieces: list[Any] = []
    for count, whole in zip((1, 4), expected, strict=True):
        del events[:]
        stream = sg.generate_stream(
            model, _prompts(), stop_token_ids=stops, tokens_per_execution=count
        )
        pieces = list(stream)
        for key in ("token_ids", "padding_mask"):
            joined = np.concatenate([one[key] for one in pieces], axis=1)
            assert np.array_equal(joined, whole[key][:, 3 : 3 + joined.shape[1]])
    assert len(pieces) > 1
    assert not [event for event in events if "compile" in event]


def test_text_is_that_of_generate() -> None:
    letters = [chr(ord("a") + index) for index in range(20)]
    vocabulary = {word: index for index, word in enumerate([*letters, "<|endoftext|>", "Ġ", "ab"])}
    tokenizer = keras_hub.tokenizers.GPT2Tokenizer(vocabulary, ["a b"])
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=16)
    with sg.MirroredStrategy(shard_state="all").scope():
        backbone = keras_hub.models.GPT2Backbone(
            vocabulary_size=len(vocabulary),
            num_layers=1,
            num_heads=2,
            hidden_dim=32,
            intermediate_dim=64,
            max_sequence_length=16,
        )
        model = keras_hub.models.GPT2CausalLM(backbone, preprocessor)
        model.compile(sampler=_SAMPLERS["top_k"]())
    expected = model.generate("abc d", strip_prompt=True)
    _sampling(model, _SAMPLERS["top_k"]())
    assert "".join(sg.generate_stream(model, "abc d")) == expected
    prompts = ["a", "bc ab"]
    rows = model.generate(prompts, max_length=9, strip_prompt=True)
    _sampling(model, _SAMPLERS["top_k"]())
    model.generate("abc d")
    texts = list(sg.generate_stream(model, prompts, max_length=9))
    assert ["".join(row) for row in zip(*texts, strict=True)] == rows


def test_beam_search_raises_an_error() -> None:
    model = _sampling(make_decoder("llama"), keras_hub.samplers.BeamSampler(num_beams=2))
    with pytest.raises(ValueError, match="keeps several sequences for a prompt"):
        next(iter(sg.generate_stream(model, _prompts(), stop_token_ids=None)))
