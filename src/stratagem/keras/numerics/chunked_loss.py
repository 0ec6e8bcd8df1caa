"""Cross-entropy over a large vocabulary, without the logits of all classes in memory.

Logits are computed for a chunk of the vocabulary at a time, once for the loss and once more for its
gradient. Rows of the batch stay apart, and a chunk's gradient is written once.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import keras

from stratagem.errors import check_number, explain, invalid
from stratagem.keras.private import set_keras_mask

if TYPE_CHECKING:
    from jax.typing import ArrayLike


def chunked_softmax_cross_entropy(
    labels: ArrayLike,
    hidden: ArrayLike,
    kernel: ArrayLike,
    bias: ArrayLike | None = None,
    *,
    vocabulary_axis: int = -1,
    chunk_size: int = 8192,
    soft_cap: float | None = None,
) -> jax.Array:
    """Cross-entropy of `hidden @ kernel + bias` with integer labels, in chunks of the vocabulary.

    Loss and gradients are those of `keras.losses.sparse_categorical_crossentropy` with
    `from_logits=True`. Memory holds the logits of `chunk_size` classes, and a step computes the
    logits twice.

    Args:
        labels: integers, shape (...). A label outside the vocabulary has loss 0.
        hidden: the input of the last layer, shape (..., dim). Its dtype is that of the products,
            which are summed in float32.
        kernel: weights of the last layer, shape (dim, vocabulary).
        bias: shape (vocabulary,), or None.
        vocabulary_axis: -1; or 0 for a kernel of shape (vocabulary, dim), such as an embedding.
        chunk_size: number of classes whose logits are in memory at a time.
        soft_cap: bound c of the logits, which become c * tanh(logits / c); None for no bound.

    Returns:
        Losses of the shape of `labels`, in float32.

    Raises:
        ValueError: shapes that do not fit, or a chunk_size or soft_cap that is not positive.
        TypeError: labels that are not integers.

    Example:
        >>> hidden, kernel = jax.numpy.ones((2, 4)), jax.numpy.zeros((4, 10))
        >>> sg.nn.chunked_softmax_cross_entropy([3, 7], hidden, kernel, chunk_size=4)
        Array([2.3025851, 2.3025851], dtype=float32)

    Source: Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language Models.
    """
    labels, hidden, kernel = jnp.asarray(labels), jnp.asarray(hidden), jnp.asarray(kernel)
    has_rows = vocabulary_axis == 0
    num_classes = kernel.shape[0 if has_rows else -1] if kernel.ndim == 2 else 0
    no_bias = jnp.zeros((num_classes,), jnp.float32)
    bias = no_bias if bias is None else jnp.asarray(bias)
    _check(labels, hidden, kernel, bias, vocabulary_axis)
    size = operator.index(chunk_size)
    check_number("chunked_softmax_cross_entropy", chunk_size=size)
    check_number("chunked_softmax_cross_entropy", above=0, or_none=True, soft_cap=soft_cap)
    chunks = _Chunks(num_classes, min(size, num_classes), has_rows, soft_cap)
    return _losses(chunks, labels, hidden, kernel.astype(hidden.dtype), bias)


def _check(labels: Any, hidden: Any, kernel: Any, bias: Any, vocabulary_axis: int) -> None:
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(
            explain(
                f"chunked_softmax_cross_entropy received labels of dtype {labels.dtype}.",
                expected="integers, one class per position.",
                fix="pass class numbers in place of one-hot labels.",
            )
        )
    is_known = vocabulary_axis in (-1, 0, 1) and kernel.ndim == 2 and hidden.ndim > 0
    dim = kernel.shape[1 if vocabulary_axis == 0 else 0] if is_known else None
    fits = is_known and hidden.shape == (*labels.shape, dim)
    if not fits or bias.shape != (kernel.size // max(dim or 1, 1),):
        raise invalid(
            f"chunked_softmax_cross_entropy received labels of shape {labels.shape}, hidden of "
            f"{hidden.shape}, a kernel of {kernel.shape} with vocabulary_axis="
            f"{vocabulary_axis} and a bias of {bias.shape}.",
            expected="labels (...), hidden (..., dim), a kernel (dim, vocabulary) and a bias "
            "(vocabulary,).",
            fix="pass vocabulary_axis=0 for an embedding table, and hidden states in place of "
            "logits.",
        )


@dataclasses.dataclass(frozen=True)
class _Chunks:
    """Division of the classes; the last chunk overlaps the one before it if need be."""

    num_classes: int
    size: int
    has_rows: bool  # the kernel's shape is (vocabulary, dim)
    soft_cap: float | None

    @property
    def starts(self) -> jax.Array:
        return jnp.arange(0, self.num_classes, self.size)

    def first(self, start: jax.Array) -> jax.Array:
        """Returns the first class of the chunk in memory."""
        return jnp.minimum(start, self.num_classes - self.size)

    def part(self, array: jax.Array, start: jax.Array) -> jax.Array:
        axis = 0 if self.has_rows else array.ndim - 1
        return jax.lax.dynamic_slice_in_dim(array, self.first(start), self.size, axis)

    def with_part(self, array: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
        """Adds a part, of which classes of an earlier chunk are zero."""
        axis = 0 if self.has_rows else array.ndim - 1
        total = self.part(array, start) + part.astype(array.dtype)
        return jax.lax.dynamic_update_slice_in_dim(array, total, self.first(start), axis)

    def classes(self, start: jax.Array) -> jax.Array:
        """Returns the class of each column; -1 for those of an earlier chunk."""
        columns = self.first(start) + jnp.arange(self.size)
        return jnp.where(columns >= start, columns, -1)

    def logits(
        self, hidden: jax.Array, kernel: jax.Array, bias: jax.Array, start: jax.Array
    ) -> jax.Array:
        """Returns the logits of a chunk; -inf for classes of an earlier one."""
        part = self.part(kernel, start)
        logits = _product(hidden, part, [hidden.ndim - 1], [1 if self.has_rows else 0])
        logits = logits + self.part(bias, start).astype(logits.dtype)
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return jnp.where(self.classes(start) < 0, -jnp.inf, logits)


def _product(left: jax.Array, right: jax.Array, of_left: list[int], of_right: list[int]) -> Any:
    axes = (of_left, of_right), ((), ())
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(
    chunks: _Chunks, labels: jax.Array, hidden: jax.Array, kernel: jax.Array, bias: jax.Array
) -> jax.Array:
    return _forward(chunks, labels, hidden, kernel, bias)[0]


def _forward(
    chunks: _Chunks, labels: jax.Array, hidden: jax.Array, kernel: jax.Array, bias: jax.Array
) -> tuple[jax.Array, Any]:
    def add(carry: Any, start: jax.Array) -> tuple[Any, None]:
        largest, total, own = carry
        logits = chunks.logits(hidden, kernel, bias, start)
        new = jnp.maximum(largest, jnp.max(logits, axis=-1))
        total = total * jnp.exp(largest - new) + jnp.sum(jnp.exp(logits - new[..., None]), axis=-1)
        is_own = chunks.classes(start) == labels[..., None]
        return (new, total, own + jnp.sum(jnp.where(is_own, logits, 0.0), axis=-1)), None

    zeros = jnp.zeros(labels.shape, jnp.float32)
    (largest, total, own), _ = jax.lax.scan(add, (zeros - jnp.inf, zeros, zeros), chunks.starts)
    normalizer = largest + jnp.log(total)
    losses = jnp.where(_is_class(chunks, labels), normalizer - own, 0.0)
    return losses, (labels, hidden, kernel, bias, normalizer)


def _backward(chunks: _Chunks, saved: Any, gradient: jax.Array) -> Any:
    labels, hidden, kernel, bias, normalizer = saved
    gradient = jnp.where(_is_class(chunks, labels), gradient, 0.0)[..., None]
    leading = list(range(labels.ndim))

    def add(carry: Any, start: jax.Array) -> tuple[Any, None]:
        of_hidden, of_kernel, of_bias = carry
        logits = chunks.logits(hidden, kernel, bias, start)
        is_own = chunks.classes(start) == labels[..., None]
        own = (jnp.exp(logits - normalizer[..., None]) - is_own.astype(jnp.float32)) * gradient
        if chunks.soft_cap is not None:
            own = own * jnp.where(jnp.isinf(logits), 0.0, 1 - (logits / chunks.soft_cap) ** 2)
        cast = own.astype(hidden.dtype)
        of_hidden = of_hidden + _product(
            cast, chunks.part(kernel, start), [cast.ndim - 1], [0 if chunks.has_rows else 1]
        )
        pair = (cast, hidden) if chunks.has_rows else (hidden, cast)
        of_kernel = chunks.with_part(of_kernel, _product(*pair, leading, leading), start)
        return (of_hidden, of_kernel, chunks.with_part(of_bias, own.sum(leading), start)), None

    zeros = jnp.zeros(hidden.shape, jnp.float32), jnp.zeros_like(kernel), jnp.zeros_like(bias)
    (of_hidden, of_kernel, of_bias), _ = jax.lax.scan(add, zeros, chunks.starts)
    return None, of_hidden.astype(hidden.dtype), of_kernel, of_bias


_losses.defvjp(_forward, _backward)


def _is_class(chunks: _Chunks, labels: jax.Array) -> jax.Array:
    return (labels >= 0) & (labels < chunks.num_classes)


# The same as a Keras loss that computes the model's last layer.


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
        raise invalid(
            "ChunkedSparseCategoricalCrossentropy was loaded from a file and has no head.",
            expected="the layer that computes the logits.",
            fix="compile the loaded model again, with a new loss.",
        )
    activation = getattr(head, "activation", None)
    is_linear = activation in (None, keras.activations.linear)
    if getattr(head, "quantization_mode", None) is not None or not is_linear:
        raise invalid(
            f"The head {head.name!r} is quantized or has an activation.",
            expected="a head that multiplies by a kernel in floating point.",
            fix="use keras.losses.SparseCategoricalCrossentropy with the model's logits.",
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
