"""A Llama of KerasHub, fine-tuned on the GPU: generated tokens, and Hugging Face's layout."""

from __future__ import annotations

import importlib.util
import tempfile
from typing import Any

import numpy as np

from validation.gpu.checks import check, device

_TOKENS = np.tile(np.arange(1, 17, dtype="int32"), (32, 1))  # counts from 1 to 16


@check(priority=1, timeout_s=200)
def tuned_llama_generates_and_is_exported() -> dict[str, Any]:
    """Generates as trained, compiles that once, and gives Transformers the same logits."""
    if importlib.util.find_spec("keras_hub") is None:
        return {"skipped": "KerasHub is not installed"}
    import jax
    import keras

    model = _tuned()
    figures: dict[str, Any] = {"losses": _fit(model, epochs=10)}
    assert figures["losses"][-1] < 0.2 * figures["losses"][0], figures
    prompt = {"token_ids": _TOKENS[:2], "padding_mask": (np.arange(16) < 4)[None].repeat(2, 0)}
    generated = model.generate(prompt, stop_token_ids=None)["token_ids"]
    figures["generated"] = np.asarray(generated).tolist()
    np.testing.assert_array_equal(generated, _TOKENS[:2])
    _fit(model, epochs=1)
    compiled: list[str] = []

    def note(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    again = model.generate(prompt, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(again, _TOKENS[:2])
    figures["compilations of the second generation"] = len(compiled)
    assert not compiled, figures
    if importlib.util.find_spec("transformers") is None:
        return figures | {"logits": "not compared: Transformers is not installed"}
    logits = np.asarray(keras.ops.convert_to_numpy(model(_inputs(2))), "float32")
    figures["difference of logits"] = float(np.abs(_of_transformers(model) - logits).max())
    figures["largest logit"] = float(np.abs(logits).max())
    assert figures["difference of logits"] < 2e-2 * figures["largest logit"], figures
    return figures


def _tuned() -> Any:
    import stratagem as sg  # isort: skip - before keras
    import keras
    import keras_hub

    keras.utils.set_random_seed(0)
    with sg.OneDeviceStrategy(device()).scope():
        backbone: Any = keras_hub.models.Llama3Backbone(
            vocabulary_size=64,
            num_layers=2,
            num_query_heads=4,
            num_key_value_heads=2,
            hidden_dim=64,
            intermediate_dim=128,
            tie_word_embeddings=True,
        )
        model: Any = keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)
        model.compile(
            keras.optimizers.AdamW(1e-2),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=None,
            sampler="greedy",
        )
    return model


def _inputs(num_sequences: int) -> dict[str, Any]:
    tokens = _TOKENS[:num_sequences, :-1]
    return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}


def _fit(model: Any, epochs: int) -> list[float]:
    history = model.fit(_inputs(32), _TOKENS[:, 1:], batch_size=8, epochs=epochs, verbose=0)
    return history.history["loss"]


def _of_transformers(model: Any) -> np.ndarray[Any, Any]:
    """Returns the logits of the exported model in PyTorch."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        model.backbone.export_to_transformers(folder)
        exported: Any = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return exported(torch.from_numpy(_TOKENS[:2, :-1]).long()).logits.numpy()
