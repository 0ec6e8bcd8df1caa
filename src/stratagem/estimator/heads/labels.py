"""Class labels: conversion between strings and ids, and checks of shape and range."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.core import Tracer

from stratagem.messages import explain

if TYPE_CHECKING:
    import jax


def check_vocabulary(label_vocabulary: object, n_classes: int) -> tuple[str, ...] | None:
    """Returns a label vocabulary as strings, one per class."""
    if label_vocabulary is None:
        return None
    if not isinstance(label_vocabulary, list | tuple) or len(label_vocabulary) != n_classes:
        raise ValueError(
            explain(
                f"label_vocabulary={label_vocabulary!r} does not match n_classes={n_classes}.",
                expected="a list or tuple of one string per class.",
                fix="pass as many strings as there are classes.",
            )
        )
    return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in label_vocabulary)


def label_ids(labels: object, vocabulary: Sequence[str] | None, n_classes: int) -> np.ndarray:
    """Converts class labels to int32 ids on the host; without a vocabulary labels are ids."""
    array = np.asarray(labels)
    is_text = array.dtype.kind in "USO"
    if is_text != (vocabulary is not None):
        raise ValueError(
            explain(
                f"Labels of dtype {array.dtype} do not fit label_vocabulary={vocabulary}.",
                expected="strings with a vocabulary, integers without.",
                fix="pass label_vocabulary with all possible strings, or integer labels.",
            )
        )
    if vocabulary is None:
        check_range(array, n_classes)
        return array.astype(np.int32) if array.dtype.kind in "iub" else array
    ids = {word: index for index, word in enumerate(vocabulary)}
    words = [w.decode() if isinstance(w, bytes) else str(w) for w in array.ravel().tolist()]
    unknown = sorted(set(words) - set(ids))
    if unknown:
        raise ValueError(
            explain(
                f"Labels {unknown[:5]} are not in the vocabulary {list(vocabulary)}.",
                expected="labels from the vocabulary.",
                fix="add them to label_vocabulary.",
            )
        )
    return np.asarray([ids[word] for word in words], np.int32).reshape(array.shape)


def check_range(labels: jax.Array | np.ndarray, n_classes: int) -> None:
    """Checks label values, unless they are traced."""
    if isinstance(labels, Tracer) or not np.size(labels):
        return
    low, high = np.min(labels), np.max(labels)
    if low < 0 or high > n_classes - 1:
        raise ValueError(
            explain(
                f"Labels range from {low} to {high}.",
                expected=f"0 to {n_classes - 1} for {n_classes} classes.",
                fix="check n_classes, or pass label_vocabulary for other labels.",
            )
        )


def class_names(vocabulary: Sequence[str] | None, n_classes: int) -> np.ndarray:
    """Returns class names as bytes, as in TensorFlow; without a vocabulary, the ids in digits."""
    words = range(n_classes) if vocabulary is None else vocabulary
    return np.asarray([str(word).encode() for word in words], dtype=object)


def matching_labels(
    labels: Any, logits: jax.Array | np.ndarray, dimension: int
) -> jax.Array | np.ndarray:
    """Returns labels in the shape of the logits except for the last axis, `dimension`."""
    if labels is None:
        raise ValueError(
            explain(
                "labels is None.",
                expected="labels for training and evaluation.",
                fix="return (features, labels) from the input function.",
            )
        )
    if labels.ndim == logits.ndim - 1 and dimension == 1:
        labels = labels[..., None]
    wanted = (*logits.shape[:-1], dimension)
    if tuple(labels.shape) != wanted:
        raise ValueError(
            explain(
                f"labels have shape {tuple(labels.shape)} with logits of shape "
                f"{tuple(logits.shape)}.",
                expected=f"shape {wanted}.",
                fix="check n_classes or label_dimension, and the labels of the input function.",
            )
        )
    return labels
