"""The models in Keras, for every side that uses Keras, on whichever backend."""

from __future__ import annotations

import functools
from typing import Any

import keras
from keras import layers, ops

from benchmarks.workloads import MLP_SIZES, LlamaSizes, TransformerSizes, Workload, mlp_weights

_EPSILON, _ROPE_WAVELENGTH = 1e-5, 500_000


def build_model(workload: Workload, *, attention: str = "causal") -> Any:
    """Returns the model of a workload, with the same weights in every process of one backend."""
    if workload.kind == "llama":
        return build_llama(workload, attention=attention)
    keras.utils.set_random_seed(0)
    if workload.is_mixed:
        keras.config.set_dtype_policy("mixed_bfloat16")
    make = {
        "mlp": _mlp,
        "small_mlp": _small_mlp,
        "cnn": _cnn,
        "transformer": _transformer,
        "gpt": _gpt,
        "resnet50": _resnet50,
    }
    return make[workload.kind](workload)


def compile_model(
    model: Any,
    workload: Workload,
    *,
    steps_per_call: int,
    accumulation: int = 1,
    loss: Any = None,
    **options: Any,
) -> None:
    """Compiles with Adam, cross entropy of logits, and accuracy, or as the model is trained."""
    optimizer: Any = keras.optimizers.Adam(workload.learning_rate)
    loss = loss or keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if workload.kind == "llama":  # in earnest training, only weights of matrices would decay
        steps = accumulation if accumulation > 1 else None
        optimizer = keras.optimizers.AdamW(
            workload.learning_rate, gradient_accumulation_steps=steps
        )
        options["weighted_metrics"] = None
    if workload.has_metrics:
        options["metrics"] = ["accuracy"]
    model.compile(optimizer, loss, steps_per_execution=steps_per_call, **options)


def fit_arguments() -> dict[str, Any]:
    """How every side calls `fit`: silently, and without shuffling, which is no framework's own."""
    return {"verbose": 0, "shuffle": False}


def fit_arrays(workload: Workload) -> tuple[Any, Any]:
    """Returns inputs as the model takes them, and labels."""
    x, y = workload.arrays()
    if workload.kind == "llama":  # by their names in KerasHub
        return {"token_ids": x, "padding_mask": (x >= 0).astype("int32")}, y
    return x, y


def _mlp(workload: Workload) -> keras.Model:
    hidden = [layers.Dense(size, activation="relu") for size in MLP_SIZES[1:-1]]
    model = keras.Sequential(
        [layers.Input(workload.input_shape), *hidden, layers.Dense(MLP_SIZES[-1])]
    )
    model.set_weights(mlp_weights())
    return model


def _small_mlp(workload: Workload) -> keras.Model:
    """What one trains on scikit-learn's digits: a step whose price is that of starting it."""
    hidden = layers.Dense(64, activation="relu")
    return keras.Sequential(
        [layers.Input(workload.input_shape), hidden, layers.Dense(workload.num_classes)]
    )


def _cnn(workload: Workload) -> keras.Model:
    """Keras's MNIST example."""
    return keras.Sequential(
        [
            layers.Input(workload.input_shape),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Flatten(),
            layers.Dense(workload.num_classes),
        ]
    )


def _transformer(workload: Workload) -> keras.Model:
    """Keras's example of text classification, without positions."""
    sizes = workload.transformer
    tokens = layers.Input((sizes.length,), dtype="int32")
    x = layers.Embedding(sizes.num_tokens, sizes.width)(tokens)
    for _ in range(sizes.num_blocks):
        attention = layers.MultiHeadAttention(sizes.num_heads, sizes.width // sizes.num_heads)
        x = layers.LayerNormalization()(x + attention(x, x))
        inner = layers.Dense(2 * sizes.width, activation="relu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(sizes.width)(inner))
    x = layers.GlobalAveragePooling1D()(x)
    return keras.Model(tokens, layers.Dense(workload.num_classes)(x))


def _resnet50(workload: Workload) -> keras.Model:
    pixels = layers.Input(workload.input_shape, dtype=workload.input_dtype)
    network = keras.applications.ResNet50(
        weights=None,
        input_shape=workload.input_shape,
        classes=workload.num_classes,
        classifier_activation=None,
    )
    if workload.input_dtype == "uint8":
        return keras.Model(pixels, network(layers.Rescaling(1 / 255)(pixels)))
    return network


def _gpt(workload: Workload) -> keras.Model:
    """GPT-2: a causal decoder with pre-normalization; its logits use the token embedding."""
    sizes = workload.transformer
    tokens = layers.Input((sizes.length,), dtype="int32")
    embedding = layers.ReversibleEmbedding(sizes.num_tokens, sizes.width, name="tokens")
    x = _Positions(name="positions")(embedding(tokens))
    for index in range(sizes.num_blocks):
        attention = _Attention(sizes, name=f"attention_{index}")
        x = x + attention(_norm(f"first_norm_{index}")(x))
        x = x + _feed_forward(_norm(f"second_norm_{index}")(x), sizes, index)
    return keras.Model(tokens, embedding(_norm("norm")(x), reverse=True))


class _Positions(layers.Layer):
    """Adds a vector for each position."""

    def build(self, input_shape: Any) -> None:
        self.vectors = self.add_weight(shape=input_shape[1:], initializer="uniform", name="vectors")

    def call(self, x: Any) -> Any:
        return x + self.vectors


class _Attention(layers.Layer):
    """Causal self-attention with one matrix for queries, keys and values."""

    def __init__(self, sizes: TransformerSizes, **options: Any) -> None:
        super().__init__(**options)
        self.num_heads = sizes.num_heads
        self.inner = layers.Dense(3 * sizes.width, name="inner")
        self.outer = layers.Dense(sizes.width, name="outer")

    def build(self, input_shape: Any) -> None:
        self.inner.build(input_shape)
        self.outer.build(input_shape)

    def call(self, x: Any) -> Any:
        length, width = x.shape[1:]
        heads = (-1, length, 3, self.num_heads, width // self.num_heads)
        parts = ops.reshape(self.inner(x), heads)
        attended = ops.dot_product_attention(
            parts[:, :, 0], parts[:, :, 1], parts[:, :, 2], is_causal=True
        )
        return self.outer(ops.reshape(attended, (-1, length, width)))


def _feed_forward(x: Any, sizes: TransformerSizes, index: int) -> Any:
    inner = layers.Dense(4 * sizes.width, activation="gelu", name=f"expand_{index}")(x)
    return layers.Dense(sizes.width, name=f"contract_{index}")(inner)


def _norm(name: str) -> layers.Layer:
    return layers.LayerNormalization(epsilon=_EPSILON, name=name)


def build_llama(workload: Workload, *, attention: str) -> Any:
    """Returns a Llama of KerasHub with random weights, not compiled.

    With LoRA, the base is in bfloat16; otherwise weights are in float32, and products in bfloat16.
    """
    import keras_hub  # which is not everywhere

    keras.utils.set_random_seed(0)
    sizes = workload.sizes
    assert isinstance(sizes, LlamaSizes)
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
