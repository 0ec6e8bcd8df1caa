"""Labels: strings of a vocabulary become ids on the host, and ids become strings again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.core import Tracer

from stratagem.messages import explain

__all__ = ["check_range", "check_vocabulary", "class_names", "label_ids", "matching_labels"]


def check_vocabulary(label_vocabulary: Any, n_classes: int) -> tuple[str, ...] | None:
    """Returns the vocabulary of labels.

    Raises:
        ValueError: no list or tuple, or of another length than the number of classes.
    """
    if label_vocabulary is None:
        return None
    if not isinstance(label_vocabulary, list | tuple) or len(label_vocabulary) != n_classes:
        raise ValueError(
            explain(
                f"label_vocabulary={label_vocabulary!r} was given for n_classes={n_classes}.",
                expected="a list or tuple of one string a class.",
                fix="pass as many strings as there are classes.",
            )
        )
    return tuple(one.decode() if isinstance(one, bytes) else str(one) for one in label_vocabulary)


def label_ids(labels: Any, vocabulary: Sequence[str] | None, n_classes: int) -> np.ndarray:
    """Returns labels of classes as int32 ids, on the host.

    Args:
        labels: array or list of ids, or of strings of the vocabulary.
        vocabulary: None if labels are ids.
        n_classes: ids are below this number.

    Raises:
        ValueError: strings without a vocabulary, or the other way round; labels of no class.
    """
    array = np.asarray(labels)
    is_text = array.dtype.kind in "USO"
    if is_text != (vocabulary is not None):
        raise ValueError(
            explain(
                f"Labels of dtype {array.dtype} were given with label_vocabulary={vocabulary}.",
                expected="strings with a vocabulary, and integers without.",
                fix="pass label_vocabulary with every string that a label can be, or ids.",
            )
        )
    if vocabulary is None:
        check_range(array, n_classes)
        return array.astype(np.int32) if array.dtype.kind in "iub" else array
    places = {word: place for place, word in enumerate(vocabulary)}
    words = [w.decode() if isinstance(w, bytes) else str(w) for w in array.ravel().tolist()]
    unknown = sorted(set(words) - set(places))
    if unknown:
        raise ValueError(
            explain(
                f"Labels {unknown[:5]} are not in the vocabulary {list(vocabulary)}.",
                expected="labels of the vocabulary.",
                fix="add them to label_vocabulary.",
            )
        )
    return np.asarray([places[word] for word in words], np.int32).reshape(array.shape)


def check_range(labels: Any, n_classes: int) -> None:
    """Checks the values of labels where they are known, which they are not in a compiled step.

    Raises:
        ValueError: one that is below 0, or above the last class.
    """
    if isinstance(labels, Tracer) or not np.size(labels):
        return
    low, high = np.min(labels), np.max(labels)
    if low < 0 or high > n_classes - 1:
        raise ValueError(
            explain(
                f"Labels range from {low} to {high}.",
                expected=f"0 to {n_classes - 1}, for {n_classes} classes.",
                fix="check n_classes, or pass label_vocabulary for labels of other values.",
            )
        )


def class_names(vocabulary: Sequence[str] | None, n_classes: int) -> np.ndarray:
    """Returns the names of classes, as bytes like TensorFlow's; in digits where they have none."""
    words = range(n_classes) if vocabulary is None else vocabulary
    return np.asarray([str(word).encode() for word in words], dtype=object)


def matching_labels(labels: Any, logits: Any, dimension: int) -> Any:
    """Returns labels of the shape of logits, but for the last axis.

    Args:
        labels: shape (batch, dimension); (batch,) is understood where `dimension` is 1.
        logits: shape (batch, logits_dimension).
        dimension: numbers that a label has.

    Raises:
        ValueError: no labels, or of another shape.
    """
    if labels is None:
        raise ValueError(
            explain(
                "labels is None.",
                expected="labels for training and evaluation.",
                fix="let the input function return (features, labels).",
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
