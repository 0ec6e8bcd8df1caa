"""KerasHub's decoders with matrices large enough to be sharded over eight devices."""

from __future__ import annotations

import functools
from typing import Any

import keras
import keras_hub
import numpy as np

from validation.third_party.programs.measuring import (
    Measurements,
    Place,
    Program,
    fitted,
    with_large_weights,
)

__all__ = ["BACKBONES", "PROGRAMS", "compile_decoder", "make_decoder", "rows"]

_VOCABULARY_SIZE = 64
_LENGTH = 8
# One full batch, and one with fewer rows than devices.
_NUM_ROWS, _BATCH_SIZE = 13, 8
_SIZES: dict[str, Any] = {
    "vocabulary_size": _VOCABULARY_SIZE,
    "num_layers": 2,
    "num_query_heads": 4,
    "num_key_value_heads": 2,
    "hidden_dim": 32,
    "intermediate_dim": 64,
}
BACKBONES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "gemma": ("Gemma", {"head_dim": 8}),
    "mistral": ("Mistral", {}),
    "qwen": ("Qwen", {}),
}


def make_decoder(name: str, dtype: str = "float32") -> Any:
    """Returns a decoder whose weights are not so small that all inputs come out alike."""
    prefix, more = BACKBONES[name]
    backbone = getattr(keras_hub.models, f"{prefix}Backbone")(**_SIZES, **more, dtype=dtype)
    task = getattr(keras_hub.models, f"{prefix}CausalLM")
    return with_large_weights(task(backbone=backbone, preprocessor=None, dtype=dtype))


def compile_decoder(model: Any, **options: Any) -> Any:
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2, epsilon=1e-3, **options),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        sampler="greedy",
    )
    return model


def rows() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Sequences of unequal lengths, the next tokens, and weights that leave out the padding."""
    random = np.random.default_rng(1)
    mask = np.arange(_LENGTH) < random.integers(3, _LENGTH + 1, _NUM_ROWS)[:, None]
    tokens = np.where(mask, random.integers(1, _VOCABULARY_SIZE, mask.shape), 0)
    inputs = {"token_ids": tokens.astype("int32"), "padding_mask": mask.astype("int32")}
    weights = np.roll(mask, -1, axis=1).astype("float32")
    weights[:, -1] = 0.0
    return inputs, np.roll(inputs["token_ids"], -1, axis=1), weights


def _fitted(place: Place, model: Any) -> dict[str, Any]:
    inputs, labels, weights = rows()
    return fitted(place, model, inputs, labels, sample_weight=weights, batch_size=_BATCH_SIZE)


def _trained(place: Place, model: Any) -> dict[str, Any]:
    results = _fitted(place, model)
    return {**results, "predict": model.predict(rows()[0], batch_size=_BATCH_SIZE, verbose=0)}


def _generated(model: Any) -> Any:
    inputs, _, _ = rows()
    prompts = {name: np.where(np.arange(_LENGTH) < 3, one, 0) for name, one in inputs.items()}
    return model.generate(prompts, stop_token_ids=None)["token_ids"]


def decoder(place: Place, name: str) -> Measurements:
    """All weights are trained, then tokens are generated."""
    with place.scope():
        model = compile_decoder(make_decoder(name))
    return {**_trained(place, model), "generated": _generated(model)}


def accumulated(place: Place) -> Measurements:
    """Two batches make one update."""
    with place.scope():
        model = compile_decoder(make_decoder("llama"), gradient_accumulation_steps=2)
    return _trained(place, model)


def bfloat16(place: Place) -> Measurements:
    """Weights in float32, computations in bfloat16."""
    with place.scope():
        model = compile_decoder(make_decoder("llama", "mixed_bfloat16"))
    return _fitted(place, model)


def adapters(place: Place, name: str, base: str | None) -> Measurements:
    """Only adapters of rank 4 are trained; the base has eight bits or all."""
    with place.scope():
        model = make_decoder(name)
        if base is not None:
            model.quantize(base)
        model.backbone.enable_lora(4)
        compile_decoder(model)
    results = {**_trained(place, model), "generated": _generated(model)}
    return {**results, "number of trained variables": len(model.trainable_variables)}


PROGRAMS: dict[str, Program] = {
    **{name: functools.partial(decoder, name=name) for name in BACKBONES},
    "llama, accumulated": accumulated,
    "llama, bfloat16": bfloat16,
    **{
        f"{name}, LoRA{on}": functools.partial(adapters, name=name, base=base)
        for name in ("llama", "gemma")
        for on, base in (("", None), (" on int8", "int8"))
    },
}
