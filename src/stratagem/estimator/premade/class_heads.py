"""Heads for classification: with two classes, and with more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain
from stratagem.estimator.export import (
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.feature_column.columns import NumericColumn
from stratagem.estimator.premade.heads import Head, matching_labels, select

# Class labels: conversion between strings and ids, and checks of shape and range.


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


# ClassHead: base of classification heads, with class names and ids.


class ClassHead(Head):
    """Base class for heads whose labels are one class per example."""

    def __init__(
        self,
        n_classes: int,
        weight_column: str | NumericColumn | None,
        label_vocabulary: Sequence[str] | None,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        self._n_classes = n_classes
        self._vocabulary = check_vocabulary(label_vocabulary, n_classes)
        self._names = class_names(self._vocabulary, n_classes)

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels, which may be strings of the vocabulary, to ids."""
        return label_ids(labels, self._vocabulary, self._n_classes)

    def decode(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Converts `classes` and `all_classes` to bytes, as in TensorFlow."""
        of_names = predictions.keys() & {"classes", "all_classes"}
        return {**predictions, **{key: self._names[predictions[key]] for key in of_names}}

    def _classification(self, predictions: dict[str, Any]) -> ClassificationOutput:
        return ClassificationOutput(predictions["probabilities"], predictions["all_class_ids"])

    def _class_predictions(
        self, logits: jax.Array, class_logits: object
    ) -> dict[str, Callable[[], Any]]:
        def class_ids() -> Any:
            ids = keras.ops.cast(keras.ops.argmax(class_logits, axis=-1), "int32")
            return keras.ops.expand_dims(ids, -1)

        def all_ids() -> Any:
            ids = keras.ops.arange(self._n_classes, dtype="int32")
            return keras.ops.broadcast_to(ids, (logits.shape[0], self._n_classes))

        return {
            "probabilities": lambda: keras.ops.softmax(class_logits, axis=-1),
            "class_ids": class_ids,
            "classes": class_ids,
            "all_class_ids": all_ids,
            "all_classes": all_ids,
        }


class BinaryClassHead(ClassHead):
    """Head for binary classification: sigmoid cross-entropy of one logit.

    Args:
        weight_column: the name of a feature of example weights, or a numeric column.
        thresholds: numbers between 0 and 1 at which to evaluate accuracy, precision and recall.
        label_vocabulary: two strings, if labels are strings; otherwise labels are 0 and 1.
        loss_reduction: "sum_over_batch_size" or "sum".
        loss_fn: a custom loss function of labels, logits and optionally features.
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if a threshold is out of range, or another argument is invalid.

    Example:
        >>> head = sg.estimator.BinaryClassHead()
        >>> labels, logits = np.array([[1], [1]]), np.array([[-41.0], [41.0]], "float32")
        >>> float(head.loss(labels, logits))
        20.5
        >>> head.predictions(logits, keys=["class_ids"])["class_ids"].tolist()
        [[0], [1]]

    Source: tensorflow/estimator binary_class_head.py, BinaryClassHead.
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(2, weight_column, label_vocabulary, loss_reduction, loss_fn, name)
        self._thresholds = tuple(thresholds or ())
        if any(not 0 < threshold < 1 for threshold in self._thresholds):
            raise ValueError(
                explain(
                    f"thresholds={self._thresholds} is out of range.",
                    expected="numbers between 0 and 1.",
                    fix="pass probabilities, such as [0.5, 0.9].",
                )
            )

    @property
    def logits_dimension(self) -> int:
        """Always 1."""
        return 1

    def predictions(self, logits: object, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns logits, logistic, probabilities, class_ids, classes and those of all classes."""
        logits = self._checked_logits(logits)
        both = keras.ops.concatenate([keras.ops.zeros_like(logits), logits], axis=-1)
        available: dict[str, Callable[[], Any]] = {
            "logits": lambda: logits,
            "logistic": lambda: keras.ops.sigmoid(logits),
            **self._class_predictions(logits, both),
        }
        return select(available, keys)

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Creates accuracy, precision, recall, AUC, and means of labels and predictions."""
        metrics = keras.metrics
        created: dict[str, Any] = {
            "average_loss": metrics.Mean(name="average_loss"),
            "accuracy": metrics.Accuracy(name="accuracy"),
            "precision": metrics.Precision(name="precision"),
            "recall": metrics.Recall(name="recall"),
            "prediction/mean": metrics.Mean(name="prediction_mean"),
            "label/mean": metrics.Mean(name="label_mean"),
            "accuracy_baseline": _AccuracyBaseline(name="accuracy_baseline"),
            "auc": metrics.AUC(name="auc"),
            "auc_precision_recall": metrics.AUC(curve="PR", name="auc_precision_recall"),
        }
        if regularization_losses is not None:
            created["regularization_loss"] = metrics.Mean(name="regularization_loss")
        for number, threshold in enumerate(self._thresholds):
            at = f"positive_threshold_{threshold:g}"
            created |= {
                f"accuracy/{at}": metrics.BinaryAccuracy(f"accuracy_{number}", threshold=threshold),
                f"precision/{at}": metrics.Precision(threshold, name=f"precision_{number}"),
                f"recall/{at}": metrics.Recall(threshold, name=f"recall_{number}"),
            }
        return {self._key(key): metric for key, metric in created.items()}

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        predicted = self.predictions(logits, ["class_ids", "logistic"])
        class_ids = keras.ops.cast(predicted["class_ids"], "float32")
        logistic = predicted["logistic"]
        by_threshold = [
            f"{kind}/positive_threshold_{threshold:g}"
            for threshold in self._thresholds
            for kind in ("accuracy", "precision", "recall")
        ]
        return {
            **dict.fromkeys(("accuracy", "precision", "recall"), (labels, class_ids)),
            "prediction/mean": (logistic,),
            "label/mean": (labels,),
            "accuracy_baseline": (labels,),
            **dict.fromkeys(("auc", "auc_precision_recall", *by_threshold), (labels, logistic)),
        }

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        labels = matching_labels(labels, logits, 1)
        check_range(labels, 2)
        return keras.ops.cast(labels, "float32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return keras.ops.binary_crossentropy(labels, logits, from_logits=True)

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        classes = self._classification(predictions)
        return {
            "serving_default": classes,
            "classification": classes,
            "regression": RegressionOutput(predictions["logistic"]),
            "predict": PredictOutput(predictions),
        }


class _AccuracyBaseline(keras.metrics.Mean):
    """Accuracy of always predicting the more frequent of the labels 0 and 1."""

    def result(self) -> Any:
        mean: Any = super().result()
        return keras.ops.where(self.count > 0, keras.ops.maximum(mean, 1 - mean), 0.0)


class MultiClassHead(ClassHead):
    """Head for more than two classes: softmax cross-entropy.

    Args:
        n_classes: the number of classes, at least 3.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings; otherwise labels are ids.
        loss_reduction: "sum_over_batch_size" or "sum".
        loss_fn: a custom loss function of labels, logits and optionally features.
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `n_classes` is below 3, or another argument is invalid.

    Example:
        >>> head = sg.estimator.MultiClassHead(n_classes=3)
        >>> logits = np.array([[10, 0, 0], [0, 10, 0]], "float32")
        >>> round(float(head.loss(np.array([[1], [1]]), logits)), 2)
        5.0

    Source: tensorflow/estimator multi_class_head.py, MultiClassHead.
    """

    def __init__(
        self,
        n_classes: int,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if not isinstance(n_classes, int) or n_classes <= 2:
            raise ValueError(
                explain(
                    f"MultiClassHead received n_classes={n_classes!r}.",
                    expected="an integer of at least 3.",
                    fix="use BinaryClassHead for two classes.",
                )
            )
        super().__init__(n_classes, weight_column, label_vocabulary, loss_reduction, loss_fn, name)

    @property
    def logits_dimension(self) -> int:
        """One logit per class."""
        return self._n_classes

    def predictions(self, logits: object, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns logits, probabilities, class_ids, classes, all_class_ids and all_classes."""
        logits = self._checked_logits(logits)
        available: dict[str, Callable[[], Any]] = {
            "logits": lambda: logits,
            **self._class_predictions(logits, logits),
        }
        return select(available, keys)

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Creates accuracy and average loss."""
        metrics: dict[str, Any] = {
            "average_loss": keras.metrics.Mean(name="average_loss"),
            "accuracy": keras.metrics.Accuracy(name="accuracy"),
        }
        if regularization_losses is not None:
            metrics["regularization_loss"] = keras.metrics.Mean(name="regularization_loss")
        return {self._key(key): metric for key, metric in metrics.items()}

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        return {"accuracy": (labels, self.predictions(logits, ["class_ids"])["class_ids"])}

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        labels = matching_labels(labels, logits, 1)
        if keras.backend.standardize_dtype(labels.dtype)[:3] not in ("int", "uin"):
            raise ValueError(
                explain(
                    f"labels have dtype {labels.dtype}.",
                    expected="integer class ids.",
                    fix="cast them to int32, or pass label_vocabulary for strings.",
                )
            )
        check_range(labels, self._n_classes)
        return keras.ops.cast(labels, "int32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        losses: Any = keras.ops.sparse_categorical_crossentropy(
            labels[..., 0], logits, from_logits=True
        )
        return losses[..., None]

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        classes = self._classification(predictions)
        return {
            "serving_default": classes,
            "classification": classes,
            "predict": PredictOutput(predictions),
        }


def binary_or_multi_class_head(
    n_classes: int,
    weight_column: str | NumericColumn | None,
    label_vocabulary: Sequence[str] | None,
    loss_reduction: Literal["sum", "sum_over_batch_size"],
) -> BinaryClassHead | MultiClassHead:
    """Creates the head for a number of classes, as in TensorFlow's head_utils.py."""
    if n_classes == 2:
        return BinaryClassHead(
            weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction
        )
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)
