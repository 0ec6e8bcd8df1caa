"""Heads turn logits into losses, predictions and metrics, of classes and of numbers."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import check_choice, check_number, check_type, invalid
from stratagem.estimator.checks import check_known, check_one_of
from stratagem.estimator.export import (
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.premade.columns import NumericColumn
from stratagem.estimator.premade.feature_column import numeric_column
from stratagem.estimator.spec import EstimatorSpec, ModeKeys, arguments_of, minimize

Reduction = Literal["sum", "sum_over_batch_size"]
WeightColumn = str | NumericColumn | None


class Head(abc.ABC):
    """Base class for the top of a model, which turns logits into losses and predictions.

    Args:
        weight_column: the name of a feature of example weights, or a numeric column; None for none.
        loss_reduction: "sum_over_batch_size" (the sum divided by the number of losses) or "sum".
        loss_fn: a function of labels, logits and optionally features that returns losses of shape
            (batch, 1) or of the labels' shape; None for the head's own loss.
        name: a suffix for metric names, after a slash.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if the reduction is unknown.

    Example:
        >>> head = sg.estimator.BinaryClassHead(label_vocabulary=["ham", "spam"])
        >>> isinstance(head, sg.estimator.Head), head.logits_dimension
        (True, 1)
        >>> head.encode_labels(np.array(["spam", "ham"])).ravel().tolist()
        [1, 0]

    Source: tensorflow/estimator base_head.py, Head.
    """

    # Values of a label, and the most weights that an example may have.
    _label_dimension = 1
    # Makers of metrics by TensorFlow's names.
    _metrics: Mapping[str, Callable[..., Any]] = {}

    def __init__(
        self,
        weight_column: WeightColumn,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        check_choice("A head", ("sum_over_batch_size", "sum"), loss_reduction=loss_reduction)
        self.loss_reduction = loss_reduction
        self._loss_fn = loss_fn
        self._loss_takes_features = loss_fn is not None and "features" in arguments_of(loss_fn)
        self.name = name
        wanted = "the name of a feature or a numeric column"
        check_type("weight_column", weight_column, WeightColumn, wanted)
        is_name = isinstance(weight_column, str)
        self.weight_column = numeric_column(weight_column) if is_name else weight_column

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """Size of the last axis of the logits."""

    @abc.abstractmethod
    def encode_labels(self, labels: object) -> np.ndarray:
        """Encodes labels on the host: converts strings to ids and checks ranges.

        Pre-made estimators call it themselves. Other input functions call it if labels are strings.
        """

    def predictions(self, logits: object, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns predictions under TensorFlow's names.

        Args:
            logits: shape (batch, logits_dimension).
            keys: the predictions to return; None for all.

        Returns:
            A dict of arrays. Class names are ids here; `decode` converts them to strings.
        """
        available = self._predictions(self._checked_logits(logits))
        check_known("Prediction keys", keys or (), available)
        return {key: available[key] for key in keys or available}

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Creates the Keras metrics of an evaluation, by TensorFlow's names."""
        makers = {"average_loss": keras.metrics.Mean, **self._metrics}
        if regularization_losses is not None:
            makers["regularization_loss"] = keras.metrics.Mean
        return {
            self._key(key): make(name=key.replace("/", "_").replace(".", "_"))
            for key, make in makers.items()
        }

    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Mapping[str, Any],
        logits: object,
        labels: object,
        regularization_losses: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Updates the metrics with a batch and returns them."""
        logits = self._checked_logits(logits)
        losses, weights = self._losses_and_weights(logits, labels, features)
        values = self._metric_values(logits, self._processed_labels(logits, labels))
        for key, arguments in {"average_loss": (losses,), **values}.items():
            eval_metrics[self._key(key)].update_state(*arguments, sample_weight=weights)
        if regularization_losses is not None:
            total = sum(regularization_losses)
            eval_metrics[self._key("regularization_loss")].update_state(total)
        return eval_metrics

    @abc.abstractmethod
    def _predictions(self, logits: jax.Array) -> dict[str, Any]:
        """Returns all predictions; a compiled step leaves out what nobody reads."""

    @abc.abstractmethod
    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        """Returns the arguments of each metric's update; `labels` are processed."""

    @abc.abstractmethod
    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        """Returns labels as the loss needs them, rank 2."""

    @abc.abstractmethod
    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        """Returns the losses of the examples, rank 2."""

    @abc.abstractmethod
    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        """Returns the export outputs by signature, the default one first, besides "predict"."""

    def decode(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Converts class ids to names, on the host.

        Args:
            predictions: the predictions of a batch, as NumPy arrays.

        Returns:
            The predictions, with strings for the names of classes.
        """
        return predictions

    def loss(
        self,
        labels: object,
        logits: object,
        features: Mapping[str, Any] | None = None,
        mode: str | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> Any:
        """Returns the loss of a batch, including regularization.

        Args:
            labels: shape (batch, label dimension), or (batch,).
            logits: shape (batch, logits_dimension).
            features: the features of the batch, for weights.
            mode: ignored.
            regularization_losses: scalars to add.

        Returns:
            A scalar. In an Estimator's step, its average over replicas equals the loss of one
            device.
        """
        del mode
        logits = self._checked_logits(logits)
        losses, weights = self._losses_and_weights(logits, labels, features or {})
        total: Any = _ReducedLosses(reduction=self.loss_reduction)(
            keras.ops.zeros_like(losses), losses, weights
        )
        return total + sum(regularization_losses or ())

    def create_estimator_spec(
        self,
        features: Mapping[str, Any],
        mode: str,
        logits: object,
        labels: object = None,
        optimizer: keras.optimizers.Optimizer | None = None,
        trainable_variables: Sequence[Any] | None = None,
        train_op_fn: Callable[[Any], Any] | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Returns the `EstimatorSpec` of a model function.

        Args:
            features: the features of the batch.
            mode: one of `ModeKeys`.
            logits: shape (batch, logits_dimension).
            labels: for training and evaluation.
            optimizer: the Keras optimizer for training.
            trainable_variables: the variables to train; None for all.
            train_op_fn: a function from the loss to the `train_op`; replaces `optimizer`.
            regularization_losses: scalars to add to the loss.

        Returns:
            The spec.

        Raises:
            ValueError: in training, unless exactly one of `optimizer` and `train_op_fn` is set.
        """
        logits = self._checked_logits(logits)
        predictions = self.predictions(logits)
        if mode == ModeKeys.PREDICT:
            own = self._export_outputs(predictions)
            outputs = {"serving_default": next(iter(own.values())), **own}
            outputs["predict"] = PredictOutput(predictions)
            return EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
        loss = self.loss(labels, logits, features, mode, regularization_losses)
        if mode == ModeKeys.EVAL:
            metrics = self.metrics(regularization_losses)
            self.update_metrics(metrics, features, logits, labels, regularization_losses)
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=metrics)
        check_one_of("create_estimator_spec", optimizer=optimizer, train_op_fn=train_op_fn)
        make_op = train_op_fn or (lambda loss: minimize(optimizer, loss, trainable_variables))
        train_op = make_op(loss)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)

    def _key(self, key: str) -> str:
        return f"{key}/{self.name}" if self.name else key

    def _checked_logits(self, logits: object) -> jax.Array:
        logits = jnp.asarray(logits, "float32")
        if logits.ndim < 2 or logits.shape[-1] != self.logits_dimension:
            raise ValueError(
                f"logits have shape {logits.shape}, not (batch, {self.logits_dimension}): end the "
                "model with keras.layers.Dense(head.logits_dimension)."
            )
        return logits

    def _losses_and_weights(
        self, logits: jax.Array, labels: object, features: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns example losses, rank 2, and weights that broadcast against them, or None."""
        processed = self._processed_labels(logits, labels)
        losses = self._own_loss(processed, logits)
        if self._loss_fn is not None:
            extra = {"features": features} if self._loss_takes_features else {}
            custom = jnp.asarray(self._loss_fn(labels=processed, logits=logits, **extra), "float32")
            if custom.shape != losses.shape:
                raise ValueError(
                    f"loss_fn returned shape {custom.shape}, not {losses.shape}, one per label."
                )
            losses = custom
        column = self.weight_column
        if column is not None and column.size not in (1, self._label_dimension):
            raise ValueError(
                f"weight_column has {column.size} weights per example, not 1 or one per label."
            )
        return losses, None if column is None else column.numbers(features)

    def _matching(self, labels: Any, logits: jax.Array) -> jax.Array | np.ndarray:
        """Returns labels in the shape of the logits except for the last axis."""
        if labels is None:
            raise ValueError("labels is None: return (features, labels) from the input function.")
        if labels.ndim == logits.ndim - 1 and self._label_dimension == 1:
            labels = labels[..., None]
        wanted = (*logits.shape[:-1], self._label_dimension)
        if tuple(labels.shape) != wanted:
            raise invalid(
                f"labels have shape {tuple(labels.shape)} with logits of shape {logits.shape}.",
                f"shape {wanted}.",
                "check n_classes or label_dimension, and the labels of the input function.",
            )
        return labels


class _ReducedLosses(keras.losses.Loss):
    """Reduction of computed losses, which excludes padding rows as all Keras losses do."""

    def call(self, y_true: object, y_pred: object) -> Any:
        return y_pred


# Classification: labels are ids, or strings of a vocabulary.


class ClassHead(Head):
    """Base class for heads whose labels are one class per example."""

    def __init__(
        self,
        n_classes: int,
        weight_column: WeightColumn,
        label_vocabulary: Sequence[str] | None,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        words = label_vocabulary
        if words is not None and not (isinstance(words, list | tuple) and len(words) == n_classes):
            raise ValueError(
                f"label_vocabulary={words!r} is not a list or tuple of {n_classes=} strings."
            )
        self._n_classes = n_classes
        self._vocabulary = None if words is None else [*map(_as_string, words)]
        # Bytes, as in TensorFlow; without a vocabulary, the ids in digits.
        names = self._vocabulary or range(n_classes)
        self._names = np.asarray([str(one).encode() for one in names], dtype=object)

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels, which may be strings of the vocabulary, to int32 ids."""
        array, vocabulary = np.asarray(labels), self._vocabulary
        if (array.dtype.kind in "USO") != (vocabulary is not None):
            raise invalid(
                f"Labels of dtype {array.dtype} do not fit label_vocabulary={vocabulary}.",
                "strings with a vocabulary, integers without.",
                "pass label_vocabulary with all possible strings, or integer labels.",
            )
        if vocabulary is None:
            self._check_range(array)
            return array.astype(np.int32) if array.dtype.kind in "iub" else array
        ids = {word: index for index, word in enumerate(vocabulary)}
        words = [_as_string(word) for word in array.ravel().tolist()]
        unknown = sorted(set(words) - set(ids))
        if unknown:
            raise ValueError(f"Labels {unknown[:5]} are not in label_vocabulary={vocabulary}.")
        return np.asarray([ids[word] for word in words], np.int32).reshape(array.shape)

    def decode(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Converts `classes` and `all_classes` to bytes, as in TensorFlow."""
        of_names = predictions.keys() & {"classes", "all_classes"}
        return {**predictions, **{key: self._names[predictions[key]] for key in of_names}}

    def _check_range(self, labels: jax.Array | np.ndarray) -> None:
        """Checks label values, unless they are traced."""
        if isinstance(labels, Tracer) or not np.size(labels):
            return
        low, high = np.min(labels), np.max(labels)
        if low < 0 or high > self._n_classes - 1:
            raise invalid(
                f"Labels range from {low} to {high}.",
                f"0 to {self._n_classes - 1} for {self._n_classes} classes.",
                "check n_classes, or pass label_vocabulary for other labels.",
            )

    def _class_predictions(self, class_logits: Any) -> dict[str, Any]:
        ids = keras.ops.cast(keras.ops.argmax(class_logits, axis=-1, keepdims=True), "int32")
        all_ids = keras.ops.arange(self._n_classes, dtype="int32")
        all_ids = keras.ops.broadcast_to(all_ids, (class_logits.shape[0], self._n_classes))
        return {
            "probabilities": keras.ops.softmax(class_logits, axis=-1),
            "class_ids": ids,
            "classes": ids,
            "all_class_ids": all_ids,
            "all_classes": all_ids,
        }

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        scores, ids = predictions["probabilities"], predictions["all_class_ids"]
        return {"classification": ClassificationOutput(scores, ids)}


def _as_string(word: object) -> str:
    return word.decode() if isinstance(word, bytes) else str(word)


class _AccuracyBaseline(keras.metrics.Mean):
    """Accuracy of always predicting the more frequent of the labels 0 and 1."""

    def result(self) -> Any:
        mean: Any = super().result()
        return keras.ops.where(self.count > 0, keras.ops.maximum(mean, 1 - mean), 0.0)


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

    _metrics: Mapping[str, Callable[..., Any]] = {
        "accuracy": keras.metrics.Accuracy,
        "precision": keras.metrics.Precision,
        "recall": keras.metrics.Recall,
        "prediction/mean": keras.metrics.Mean,
        "label/mean": keras.metrics.Mean,
        "accuracy_baseline": _AccuracyBaseline,
        "auc": keras.metrics.AUC,
        "auc_precision_recall": partial(keras.metrics.AUC, curve="PR"),
    }

    def __init__(
        self,
        weight_column: WeightColumn = None,
        thresholds: Sequence[float] | None = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(2, weight_column, label_vocabulary, loss_reduction, loss_fn, name)
        if any(not 0 < threshold < 1 for threshold in thresholds or ()):
            raise ValueError(f"thresholds={thresholds} has numbers that are not between 0 and 1.")
        for threshold in thresholds or ():
            at = f"positive_threshold_{threshold:g}"
            self._metrics = {
                **self._metrics,
                f"accuracy/{at}": partial(keras.metrics.BinaryAccuracy, threshold=threshold),
                f"precision/{at}": partial(keras.metrics.Precision, threshold),
                f"recall/{at}": partial(keras.metrics.Recall, threshold),
            }

    @property
    def logits_dimension(self) -> int:
        """Always 1."""
        return 1

    def _predictions(self, logits: jax.Array) -> dict[str, Any]:
        both = keras.ops.concatenate([keras.ops.zeros_like(logits), logits], axis=-1)
        return {
            "logits": logits,
            "logistic": keras.ops.sigmoid(logits),
            **self._class_predictions(both),
        }

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        predicted = self._predictions(logits)
        class_ids = keras.ops.cast(predicted["class_ids"], "float32")
        logistic = predicted["logistic"]
        by_score = [key for key in self._metrics if key.startswith("auc") or "/positive" in key]
        return {
            **dict.fromkeys(("accuracy", "precision", "recall"), (labels, class_ids)),
            "prediction/mean": (logistic,),
            "label/mean": (labels,),
            "accuracy_baseline": (labels,),
            **dict.fromkeys(by_score, (labels, logistic)),
        }

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        matching = self._matching(labels, logits)
        self._check_range(matching)
        return keras.ops.cast(matching, "float32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return keras.ops.binary_crossentropy(labels, logits, from_logits=True)

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        regression = {"regression": RegressionOutput(predictions["logistic"])}
        return {**super()._export_outputs(predictions), **regression}


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

    _metrics: Mapping[str, Callable[..., Any]] = {"accuracy": keras.metrics.Accuracy}

    def __init__(
        self,
        n_classes: int,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        name: str | None = None,
    ) -> None:
        if n_classes <= 2:
            raise ValueError(f"n_classes={n_classes!r} is below 3: use BinaryClassHead for 2.")
        super().__init__(n_classes, weight_column, label_vocabulary, loss_reduction, loss_fn, name)

    @property
    def logits_dimension(self) -> int:
        """One logit per class."""
        return self._n_classes

    def _predictions(self, logits: jax.Array) -> dict[str, Any]:
        return {"logits": logits, **self._class_predictions(logits)}

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        return {"accuracy": (labels, self._predictions(logits)["class_ids"])}

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        matching = self._matching(labels, logits)
        if keras.backend.standardize_dtype(matching.dtype)[:3] not in ("int", "uin"):
            raise ValueError(f"labels have dtype {matching.dtype}: cast class ids to int32.")
        self._check_range(matching)
        return keras.ops.cast(matching, "int32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        losses: Any = keras.ops.sparse_categorical_crossentropy(
            labels[..., 0], logits, from_logits=True
        )
        return losses[..., None]


def class_head(
    n_classes: int,
    weight_column: WeightColumn,
    label_vocabulary: Sequence[str] | None,
    loss_reduction: Reduction,
) -> ClassHead:
    """Creates the head for a number of classes, as in TensorFlow's head_utils.py."""
    if n_classes == 2:
        return BinaryClassHead(weight_column, None, label_vocabulary, loss_reduction)
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)


# Regression: numbers, counts and proportions.


class RegressionHead(Head):
    """Head for regression: squared error.

    Args:
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column, which may have
            one weight per value of a label.
        loss_reduction: "sum_over_batch_size" (the average over examples and values) or "sum".
        loss_fn: a custom loss function of labels, logits and optionally features.
        inverse_link_fn: maps logits to predictions; None if they are the same.
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `label_dimension` is below 1, or another argument is invalid.

    Example:
        >>> head = sg.estimator.RegressionHead()
        >>> labels, logits = np.array([[1.0], [3.0]]), np.array([[1.0], [1.0]])
        >>> float(head.loss(labels, logits))
        2.0

    Source: tensorflow/estimator regression_head.py, RegressionHead.
    """

    _metrics: Mapping[str, Callable[..., Any]] = dict.fromkeys(
        ("prediction/mean", "label/mean"), keras.metrics.Mean
    )

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        check_number(type(self).__name__, label_dimension=label_dimension)
        self._label_dimension = label_dimension
        self._inverse_link_fn = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        """One logit per value of a label."""
        return self._label_dimension

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32."""
        return np.asarray(labels).astype(np.float32)

    def _predictions(self, logits: jax.Array) -> dict[str, Any]:
        if self._inverse_link_fn is None:
            return {"predictions": logits}
        return {"predictions": self._inverse_link_fn(logits), "logits": logits}

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        predictions = self._predictions(logits)["predictions"]
        return {"prediction/mean": (predictions,), "label/mean": (labels,)}

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        return keras.ops.cast(self._matching(labels, logits), "float32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return keras.ops.square(labels - logits)

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        return {"regression": RegressionOutput(predictions["predictions"])}


class PoissonRegressionHead(RegressionHead):
    """Head for counts: the logit is the log of their mean.

    Args:
        label_dimension: the number of counts per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        compute_full_loss: True to add Stirling's approximation of log(labels!), which has no
            gradient.
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `label_dimension` is below 1 or the reduction is unknown.

    Example:
        >>> head = sg.estimator.PoissonRegressionHead()
        >>> float(head.predictions(np.zeros((1, 1), "float32"))["predictions"][0, 0])
        1.0

    Source: tensorflow/estimator regression_head.py, PoissonRegressionHead; TF 2.21 nn_impl.py,
    log_poisson_loss.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, None, jnp.exp, name)
        self._compute_full_loss = compute_full_loss

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are not negative."""
        counts = super().encode_labels(labels)
        if np.any(counts < 0):
            raise ValueError(f"Labels of a Poisson regression include {counts.min()}, not counts.")
        return counts

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        losses = jnp.exp(logits) - labels * logits
        if not self._compute_full_loss:
            return losses
        above = jnp.maximum(labels, 1.0)  # keeps log(0) out of both branches
        stirling = above * jnp.log(above) - above + 0.5 * jnp.log(2 * math.pi * above)
        return losses + jnp.where(labels > 1, stirling, 0.0)


class LogisticRegressionHead(RegressionHead):
    """Head for proportions from 0 to 1: the loss is the cross-entropy.

    Args:
        label_dimension: the number of proportions per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".
        name: a suffix for metric names.

    Raises:
        TypeError: if `weight_column` has the wrong type.
        ValueError: if `label_dimension` is below 1 or the reduction is unknown.

    Example:
        >>> head = sg.estimator.LogisticRegressionHead()
        >>> float(head.predictions(np.zeros((1, 1), "float32"))["predictions"][0, 0])
        0.5

    Source: tensorflow/estimator regression_head.py, LogisticRegressionHead.
    """

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(label_dimension, weight_column, loss_reduction, None, jax.nn.sigmoid, name)

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are from 0 to 1."""
        proportions = super().encode_labels(labels)
        if np.any((proportions < 0) | (proportions > 1)):
            raise ValueError(
                f"Labels of a logistic regression range from {proportions.min()} to "
                f"{proportions.max()}, not from 0 to 1."
            )
        return proportions

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return keras.ops.binary_crossentropy(labels, logits, from_logits=True)
