"""A Llama of KerasHub with random weights, for the sides that use Keras."""

from __future__ import annotations

import functools
from typing import Any

import keras
import keras_hub
from keras import ops

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.transformer_sizes import LlamaSizes

__all__ = ["attend_causally", "build_llama", "keras_arrays", "make_optimizer"]

_ROPE_WAVELENGTH = 500_000
_EPSILON = 1e-5


def build_llama(model: GpuModel, *, attention: str) -> Any:
    """Returns a causal language model, not compiled, with the same weights in every process.

    Args:
        model: sizes. With LoRA, the base is in bfloat16; otherwise weights are in float32, and
            computations in bfloat16.
        attention: "causal" or "mask".
    """
    sizes = model.transformer
    assert isinstance(sizes, LlamaSizes)
    keras.utils.set_random_seed(0)
    backbone: Any = keras_hub.models.Llama3Backbone(
        vocabulary_size=sizes.num_tokens,
        num_layers=sizes.num_blocks,
        num_query_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        hidden_dim=sizes.width,
        intermediate_dim=sizes.inner_width,
        rope_max_wavelength=_ROPE_WAVELENGTH,
        layer_norm_epsilon=_EPSILON,
        tie_word_embeddings=sizes.is_tied,
        dtype="bfloat16" if sizes.lora_rank else "mixed_bfloat16",
    )
    if sizes.lora_rank:
        backbone.enable_lora(sizes.lora_rank)
    if attention == "causal":
        attend_causally(backbone)
    return keras_hub.models.Llama3CausalLM(backbone, preprocessor=None)


def attend_causally(backbone: Any) -> None:
    """Lets the attention kernel be causal by itself, where KerasHub passes it a mask.

    A mask makes the kernel compute and load all pairs of positions, also those that it removes, and
    write a gradient of the mask. Positions see none after them either way; padding must be on the
    right, as no position before it sees it then. KerasHub also repeats keys and values for each
    query head, which the kernel does not need.
    """
    for block in backbone.transformer_layers:
        attention = block._self_attention_layer
        attention._compute_attention = functools.partial(_attend, attention._compute_attention)


def _attend(masked: Any, query: Any, key: Any, value: Any, attention_mask: Any = None) -> Any:
    if query.shape[1] != key.shape[1]:  # generates one token with a cache of those before
        return masked(query, key, value, attention_mask)
    groups = masked.__self__.num_key_value_groups
    return ops.dot_product_attention(
        query, key[:, :, ::groups], value[:, :, ::groups], is_causal=True
    )


def make_optimizer(model: GpuModel, accumulation: int) -> keras.optimizers.Optimizer:
    """Returns Keras's AdamW; only weights of matrices would decay in earnest training."""
    steps = accumulation if accumulation > 1 else None
    return keras.optimizers.AdamW(model.learning_rate, gradient_accumulation_steps=steps)


def keras_arrays(model: GpuModel) -> tuple[dict[str, Any], Any]:
    """Returns the inputs by their names in KerasHub, and the labels."""
    tokens, labels = model.arrays()
    return {"token_ids": tokens, "padding_mask": (tokens >= 0).astype("int32")}, labels
