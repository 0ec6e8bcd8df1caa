"""KerasHub's decoders generate a sequence for each device, before and after training."""

from __future__ import annotations

import functools
from typing import Any

import keras_hub
import numpy as np

from validation.third_party.programs.keras_hub_sharded import compile_decoder, make_decoder, rows
from validation.third_party.programs.measuring import Measurements, Place, Program, fitted

__all__ = ["PROGRAMS", "compiled", "generated"]

_NUM_PROMPTS = 8


def compiled(name: str, base: str | None = None) -> Any:
    """Returns a decoder that samples from five tokens; with adapters on a quantized base."""
    model = make_decoder(name)
    if base is not None:
        model.quantize(base)
        model.backbone.enable_lora(4)
    compile_decoder(model)
    model.sampler = keras_hub.samplers.TopKSampler(5, seed=7)
    return model


def generated(model: Any) -> Any:
    prompts = {
        key: np.where(np.arange(8) < 3, one, 0)[:_NUM_PROMPTS] for key, one in rows()[0].items()
    }
    return model.generate(prompts, stop_token_ids=None)["token_ids"]


def _program(place: Place, name: str, base: str | None) -> Measurements:
    with place.scope():
        model = compiled(name, base)
    first = [generated(model) for _ in range(2)]
    inputs, labels, weights = rows()
    fitted(place, model, inputs, labels, sample_weight=weights, batch_size=8)
    return {"first": first[0], "second": first[1], "trained": generated(model)}


PROGRAMS: dict[str, Program] = {
    "llama": functools.partial(_program, name="llama", base=None),
    "gemma": functools.partial(_program, name="gemma", base=None),
    "gemma, LoRA on int8": functools.partial(_program, name="gemma", base="int8"),
}
