"""The Llama of the GPU benchmarks: sizes, the causal kernel, and the sides that train it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import pytest

from benchmarks.gpu.models import GpuModel, model_of
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.transformer_sizes import LlamaSizes
from benchmarks.gpu.workers import jax_llama, keras_llama_side, stratagem_llama
from benchmarks.gpu.workers.keras_llama import build_llama, keras_arrays


@pytest.fixture(autouse=True)
def _leave_policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def _sizes(model: GpuModel) -> LlamaSizes:
    assert isinstance(model.transformer, LlamaSizes)
    return model.transformer


def _count(variables: Any) -> int:
    return sum(int(np.prod(one.shape)) for one in variables)


@pytest.mark.parametrize("name", ["llama1b", "llama8b-lora"])
def test_flops_count_the_weights_of_the_model(name: str) -> None:
    model = model_of(name, is_tiny=True)
    sizes, network = _sizes(model), build_llama(model, attention="causal")
    looked_up = 0 if sizes.is_tied else sizes.num_tokens * sizes.width
    base = [one for one in network.variables if "lora" not in one.path and "seed" not in one.path]
    assert _count(base) == sizes.num_multiplied + looked_up
    is_lora = ["lora" in one.path for one in network.trainable_variables]
    assert is_lora == [bool(sizes.lora_rank)] * len(is_lora)
    assert {one.dtype for one in base} == {"bfloat16" if sizes.lora_rank else "float32"}


def test_the_causal_kernel_gives_the_logits_of_the_mask() -> None:
    model = model_of("llama1b", is_tiny=True)
    inputs, _ = keras_arrays(model)
    first = {name: one[:2] for name, one in inputs.items()}
    logits = [
        np.asarray(build_llama(model, attention=attention)(first), "float32")
        for attention in ("causal", "mask")
    ]
    np.testing.assert_allclose(*logits, atol=1e-3)
    first["token_ids"] = first["token_ids"].copy()
    first["token_ids"][:, 10:] = 0
    changed = np.asarray(build_llama(model, attention="causal")(first), "float32")
    np.testing.assert_allclose(changed[:, :10], logits[0][:, :10], atol=1e-3)
    assert np.abs(changed[:, 10:] - logits[0][:, 10:]).max() > 1e-2


def test_generated_tokens_are_those_of_the_mask() -> None:
    model = model_of("llama1b", is_tiny=True)
    tokens = np.arange(1, 17, dtype="int32")[None].repeat(2, axis=0)
    prompt = {"token_ids": tokens, "padding_mask": (np.arange(16)[None] < 6).repeat(2, axis=0)}
    generated = []
    for attention in ("causal", "mask"):
        network = build_llama(model, attention=attention)
        network.compile(sampler="greedy")
        generated.append(network.generate(prompt, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*generated)


_TRAINED = dataclasses.replace(model_of("llama1b", is_tiny=True), learning_rate=1e-3)


def _losses(prepare: Any, model: GpuModel = _TRAINED, **options: Any) -> list[float]:
    given = SideOptions(model=model.name, result="", begun_s=0.0, platform="cpu", **options)
    training = prepare(given, model)
    return [training.first_call(), training.train(2)]


@functools.cache  # not a fixture: those of a module run before types may be promoted
def _by_hand() -> list[float]:
    return _losses(jax_llama.prepare, steps_per_call=4)


@functools.cache
def _summed_by_hand() -> list[float]:
    return _losses(jax_llama.prepare, steps_per_call=4, accumulation=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_call": 4},
        {"steps_per_call": 4, "loss": "chunks"},
        {"steps_per_call": 4, "remat": "dots"},
        {"steps_per_call": 4, "optimizer_memory": "pinned_host", "attention": "mask"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_losses_are_those_of_the_scan_by_hand(options: dict[str, Any]) -> None:
    assert _by_hand()[1] < _by_hand()[0] - 0.1
    np.testing.assert_allclose(_losses(stratagem_llama.prepare, **options), _by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_losses_of_keras_are_those_of_the_scan_by_hand() -> None:
    found = _losses(keras_llama_side.prepare, steps_per_call=4, attention="mask")
    np.testing.assert_allclose(found, _by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_gradients_of_four_batches_by_hand_are_those_of_one_large_batch() -> None:
    large = dataclasses.replace(_TRAINED, batch_size=8, steps_per_epoch=2)
    expected = _losses(jax_llama.prepare, model=large)
    assert expected[1] < expected[0]
    np.testing.assert_allclose(_summed_by_hand(), expected, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "options"),
    [
        (stratagem_llama, {"steps_per_call": 4}),
        (stratagem_llama, {"steps_per_call": 4, "optimizer_memory": "pinned_host"}),
        (keras_llama_side, {"steps_per_call": 4, "attention": "mask"}),
    ],
    ids=["fit", "fit, pinned_host", "Keras fit"],
)
def test_gradients_of_four_batches_are_those_by_hand(side: Any, options: dict[str, Any]) -> None:
    found = _losses(side.prepare, accumulation=4, **options)
    np.testing.assert_allclose(found, _summed_by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_lora_trains_under_the_strategy() -> None:
    model = dataclasses.replace(model_of("llama8b-lora", is_tiny=True), learning_rate=1e-3)
    first, last = _losses(stratagem_llama.prepare, model, loss="chunks")
    assert last < first
