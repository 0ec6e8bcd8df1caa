"""`ChunkedSparseCategoricalCrossentropy`: a Keras loss that computes the model's last layer."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import keras

from stratagem.errors import explain
from stratagem.keras.numerics.chunked_loss import chunked_softmax_cross_entropy
from stratagem.keras.private import set_keras_mask


@keras.saving.register_keras_serializable("stratagem")
class ChunkedSparseCategoricalCrossentropy(keras.losses.Loss):
    """`SparseCategoricalCrossentropy(from_logits=True)` of hidden states, without whole logits.

    The model returns the input of its last layer, as a KerasHub backbone does, and the loss
    computes that layer, the head, for a chunk of the vocabulary at a time. The head must be one of
    the layers of the trained model, so that its weights are trained, too.

    A loaded model has to be compiled again, because its file holds no reference to the head.

    Args:
        head: a built `keras.layers.Dense` without activation, or a
            `keras.layers.ReversibleEmbedding`, such as `backbone.token_embedding`.
        chunk_size: number of classes whose logits are in memory at a time.
        ignore_class: label of positions that do not count, or None.
        reduction, name, dtype: as in `keras.losses.Loss`.

    Raises:
        TypeError: a head of another kind.
        ValueError: a quantized head, or one with an activation, when the loss is computed.

    Example:
        >>> inputs = keras.Input((6,), dtype="int32")
        >>> embedding = keras.layers.ReversibleEmbedding(1000, 4)
        >>> model = keras.Model(inputs, embedding(inputs))
        >>> loss = sg.nn.ChunkedSparseCategoricalCrossentropy(embedding, chunk_size=256)
        >>> model.compile("sgd", loss)
        >>> tokens = jax.numpy.arange(12).reshape(2, 6)
        >>> history = model.fit(tokens[:, :], tokens, verbose=0)

    Source: keras.losses.SparseCategoricalCrossentropy.
    """

    def __init__(
        self,
        head: keras.layers.Layer | None,
        *,
        chunk_size: int = 8192,
        ignore_class: int | None = None,
        reduction: Any = "sum_over_batch_size",
        name: str | None = "chunked_sparse_categorical_crossentropy",
        dtype: Any = None,
    ) -> None:
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if head is not None and not (_is_dense(head) or _is_table(head)):
            raise _unknown_head(head)
        self.head = head
        self.chunk_size = chunk_size
        self.ignore_class = ignore_class

    def call(self, y_true: Any, y_pred: Any) -> Any:
        """Returns the losses of all positions."""
        labels = jnp.asarray(keras.ops.cast(y_true, "int32"))
        if labels.ndim == y_pred.ndim:  # Keras allows a last axis of size 1
            labels = labels.squeeze(-1)
        hidden, weights = _head_of(self.head, y_pred)
        if self.ignore_class is None:
            return chunked_softmax_cross_entropy(
                labels, hidden, **weights, chunk_size=self.chunk_size
            )
        counts = labels != self.ignore_class
        labels = jnp.where(counts, labels, -1)
        losses = chunked_softmax_cross_entropy(
            labels, hidden, **weights, chunk_size=self.chunk_size
        )
        set_keras_mask(losses, counts)
        return losses

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, without the head."""
        own = {"head": None, "chunk_size": self.chunk_size, "ignore_class": self.ignore_class}
        return {**super().get_config(), **own}


def _is_dense(layer: object) -> bool:
    return isinstance(layer, keras.layers.Dense)


def _is_table(layer: object) -> bool:
    """True for Keras's ReversibleEmbedding, and for KerasHub's."""
    return isinstance(layer, keras.layers.Embedding) and hasattr(layer, "tie_weights")


def _head_of(head: Any, y_pred: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the head's input in its dtype, and the arguments that describe its weights."""
    if head is None:
        raise ValueError(
            explain(
                "ChunkedSparseCategoricalCrossentropy was loaded from a file and has no head.",
                expected="the layer that computes the logits.",
                fix="compile the loaded model again, with a new loss.",
            )
        )
    activation = getattr(head, "activation", None)
    is_linear = activation in (None, keras.activations.linear)
    if getattr(head, "quantization_mode", None) is not None or not is_linear:
        raise ValueError(
            explain(
                f"The head {head.name!r} is quantized or has an activation.",
                expected="a head that multiplies by a kernel in floating point.",
                fix="use keras.losses.SparseCategoricalCrossentropy with the model's logits.",
            )
        )
    dtype = getattr(head, "reverse_dtype", None) or head.compute_dtype
    hidden = jnp.asarray(keras.ops.cast(y_pred, dtype))
    if _is_dense(head):
        return hidden, {"kernel": _array(head.kernel), "bias": _array(head.bias)}
    is_tied = head.tie_weights
    kernel = head.embeddings if is_tied else head.reverse_embeddings
    soft_cap = getattr(head, "logit_soft_cap", None)
    axis = 0 if is_tied else -1
    return hidden, {"kernel": _array(kernel), "vocabulary_axis": axis, "soft_cap": soft_cap}


def _array(weight: Any) -> Any:
    return None if weight is None else keras.ops.convert_to_tensor(weight)


def _unknown_head(head: object) -> TypeError:
    return TypeError(
        explain(
            f"ChunkedSparseCategoricalCrossentropy received head={head!r}.",
            expected="a keras.layers.Dense or a ReversibleEmbedding.",
            fix="for another head, call sg.nn.chunked_softmax_cross_entropy with its kernel in a "
            "custom compute_loss.",
        )
    )
