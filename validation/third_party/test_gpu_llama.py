"""The Llama of the GPU benchmarks: sizes, the causal kernel, and the sides that train it."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import keras
import numpy as np
import pytest

from benchmarks.workers import jax_by_hand, keras_fit, stratagem_fit
from benchmarks.workers.keras_models import build_llama, fit_arrays
from benchmarks.workers.protocol import WorkerOptions
from benchmarks.workloads import GPU_WORKLOADS, LlamaSizes, Workload, tiny


@pytest.fixture(autouse=True)
def _leave_policy():
    before = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(before)


def _sizes(model: Workload) -> LlamaSizes:
    assert isinstance(model.sizes, LlamaSizes)
    return model.sizes


def _count(variables: Any) -> int:
    return sum(int(np.prod(one.shape)) for one in variables)


@pytest.mark.parametrize("name", ["llama1b", "llama8b_lora"])
def test_flops_count_the_weights_of_the_model(name: str) -> None:
    model = tiny(GPU_WORKLOADS[name])
    sizes, network = _sizes(model), build_llama(model, attention="causal")
    looked_up = 0 if sizes.is_tied else sizes.num_tokens * sizes.width
    base = [one for one in network.variables if "lora" not in one.path and "seed" not in one.path]
    assert _count(base) == sizes.num_multiplied + looked_up
    is_lora = ["lora" in one.path for one in network.trainable_variables]
    assert is_lora == [bool(sizes.lora_rank)] * len(is_lora)
    assert {one.dtype for one in base} == {"bfloat16" if sizes.lora_rank else "float32"}


def test_the_causal_kernel_gives_the_logits_of_the_mask() -> None:
    model = tiny(GPU_WORKLOADS["llama1b"])
    inputs, _ = fit_arrays(model)
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
    model = tiny(GPU_WORKLOADS["llama1b"])
    tokens = np.arange(1, 17, dtype="int32")[None].repeat(2, axis=0)
    prompt = {"token_ids": tokens, "padding_mask": (np.arange(16)[None] < 6).repeat(2, axis=0)}
    generated = []
    for attention in ("causal", "mask"):
        network = build_llama(model, attention=attention)
        network.compile(sampler="greedy")
        generated.append(network.generate(prompt, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*generated)


_TRAINED = dataclasses.replace(tiny(GPU_WORKLOADS["llama1b"]), learning_rate=1e-3)


def _losses(prepare: Any, model: Workload = _TRAINED, **options: Any) -> list[float]:
    training = prepare(WorkerOptions(workload=model.name, **options), model)
    return [training.run_epochs(1), training.run_epochs(2)]


@functools.cache  # not a fixture: those of a module run before types may be promoted
def _by_hand() -> list[float]:
    return _losses(jax_by_hand.prepare, steps_per_call=4)


@functools.cache
def _summed_by_hand() -> list[float]:
    return _losses(jax_by_hand.prepare, steps_per_call=4, accumulation=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"steps_per_call": 4},
        {"steps_per_call": 4, "has_chunks": True},
        {"steps_per_call": 4, "remat": "dots"},
        {"steps_per_call": 4, "optimizer_memory": "pinned_host", "attention": "mask"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_losses_are_those_of_the_scan_by_hand(options: dict[str, Any]) -> None:
    assert _by_hand()[1] < _by_hand()[0] - 0.1
    np.testing.assert_allclose(_losses(stratagem_fit.prepare, **options), _by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_losses_of_keras_are_those_of_the_scan_by_hand() -> None:
    found = _losses(keras_fit.prepare, steps_per_call=4, attention="mask")
    np.testing.assert_allclose(found, _by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_gradients_of_four_batches_by_hand_are_those_of_one_large_batch() -> None:
    large = dataclasses.replace(_TRAINED, batch_size=8, steps_per_epoch=2)
    expected = _losses(jax_by_hand.prepare, model=large)
    assert expected[1] < expected[0]
    np.testing.assert_allclose(_summed_by_hand(), expected, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("side", "options"),
    [
        (stratagem_fit, {"steps_per_call": 4}),
        (stratagem_fit, {"steps_per_call": 4, "optimizer_memory": "pinned_host"}),
        (keras_fit, {"steps_per_call": 4, "attention": "mask"}),
    ],
    ids=["fit", "fit, pinned_host", "Keras fit"],
)
def test_gradients_of_four_batches_are_those_by_hand(side: Any, options: dict[str, Any]) -> None:
    found = _losses(side.prepare, accumulation=4, **options)
    np.testing.assert_allclose(found, _summed_by_hand(), rtol=2e-3)


@pytest.mark.slow
def test_lora_trains_under_the_strategy() -> None:
    model = dataclasses.replace(tiny(GPU_WORKLOADS["llama8b_lora"]), learning_rate=1e-3)
    first, last = _losses(stratagem_fit.prepare, model, has_chunks=True)
    assert last < first
