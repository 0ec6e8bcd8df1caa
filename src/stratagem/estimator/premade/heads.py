"""Heads turn logits into losses, predictions and metrics: the base class, and regression."""

from __future__ import annotations

import abc
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.checks import check_known, check_number, check_one_of, check_type
from stratagem.estimator.export import ExportOutput, PredictOutput, RegressionOutput
from stratagem.estimator.feature_column.columns import NumericColumn, numeric_column
from stratagem.estimator.spec import EstimatorSpec, ModeKeys, minimize

_LOSS_ARGUMENTS = ("labels", "logits", "features")


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
        ValueError: if the reduction is unknown, or `loss_fn` takes other arguments.

    Example:
        >>> head = sg.estimator.BinaryClassHead(label_vocabulary=["ham", "spam"])
        >>> isinstance(head, sg.estimator.Head), head.logits_dimension
        (True, 1)
        >>> head.encode_labels(np.array(["spam", "ham"])).ravel().tolist()
        [1, 0]

    Source: tensorflow/estimator base_head.py, Head.
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        check_known("loss_reduction", [loss_reduction], ("sum_over_batch_size", "sum"))
        self.loss_reduction = loss_reduction
        self._loss_fn_arguments = () if loss_fn is None else _arguments_of(loss_fn)
        self._loss_fn = loss_fn
        self.name = name
        self.weight_column = _weight_column(weight_column)

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """Size of the last axis of the logits."""

    @abc.abstractmethod
    def encode_labels(self, labels: object) -> np.ndarray:
        """Encodes labels on the host: converts strings to ids and checks ranges.

        Pre-made estimators call it themselves. Other input functions call it if labels are strings.
        """

    @abc.abstractmethod
    def predictions(self, logits: object, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns predictions under TensorFlow's names.

        Args:
            logits: shape (batch, logits_dimension).
            keys: the predictions to return; None for all.

        Returns:
            A dict of arrays. Class names are ids here; `decode` converts them to strings.
        """

    @abc.abstractmethod
    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Creates the Keras metrics of an evaluation, by TensorFlow's names."""

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

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        """Returns the arguments of each metric's update; `labels` are processed."""
        raise NotImplementedError

    @abc.abstractmethod
    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        """Returns labels as the loss needs them, rank 2."""

    @abc.abstractmethod
    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        """Returns the losses of the examples, rank 2."""

    @abc.abstractmethod
    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        """Returns the export outputs by signature."""

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
            outputs = self._export_outputs(predictions)
            return EstimatorSpec(mode, predictions=predictions, export_outputs=outputs)
        loss = self.loss(labels, logits, features, mode, regularization_losses)
        if mode == ModeKeys.EVAL:
            metrics = self.metrics(regularization_losses)
            self.update_metrics(metrics, features, logits, labels, regularization_losses)
            return EstimatorSpec(mode, predictions=predictions, loss=loss, eval_metric_ops=metrics)
        check_one_of("create_estimator_spec", optimizer=optimizer, train_op_fn=train_op_fn)
        if train_op_fn is None:
            train_op = minimize(optimizer, loss, trainable_variables)
        else:
            train_op = train_op_fn(loss)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)

    def _key(self, key: str) -> str:
        return f"{key}/{self.name}" if self.name else key

    def _checked_logits(self, logits: object) -> jax.Array:
        logits = jnp.asarray(logits, "float32")
        if logits.ndim < 2 or logits.shape[-1] != self.logits_dimension:
            raise ValueError(
                explain(
                    f"logits have shape {tuple(logits.shape)}.",
                    expected=f"shape (batch, {self.logits_dimension}).",
                    fix="end the model with keras.layers.Dense(head.logits_dimension).",
                )
            )
        return logits

    def _losses_and_weights(
        self, logits: jax.Array, labels: object, features: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Returns example losses, rank 2, and weights that broadcast against them, or None."""
        processed = self._processed_labels(logits, labels)
        default = self._own_loss(processed, logits)
        losses = default
        if self._loss_fn is not None:
            extra = {"features": features} if "features" in self._loss_fn_arguments else {}
            losses = jnp.asarray(self._loss_fn(labels=processed, logits=logits, **extra), "float32")
            if losses.shape != default.shape:
                raise ValueError(
                    explain(
                        f"loss_fn returned shape {tuple(losses.shape)}.",
                        expected=f"shape {tuple(default.shape)}, one loss per label.",
                        fix="return unreduced losses and keep the last axis.",
                    )
                )
        return losses, self._weights(features, logits)

    def _weights(self, features: Mapping[str, Any], logits: object) -> Any:
        if self.weight_column is None:
            return None
        if self.weight_column.size not in (1, self._max_weights_per_example):
            raise ValueError(
                explain(
                    f"weight_column has {self.weight_column.size} weights per example.",
                    expected=f"1 or {self._max_weights_per_example}.",
                    fix="pass the name of a feature with one number per example.",
                )
            )
        return self.weight_column.numbers(features)

    @property
    def _max_weights_per_example(self) -> int:
        """Number of weights an example may have besides one."""
        return 1


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


def select(
    available: Mapping[str, Callable[[], Any]], keys: Sequence[str] | None
) -> dict[str, Any]:
    """Computes the requested predictions; None for all."""
    check_known("Prediction keys", keys or (), available)
    return {key: available[key]() for key in keys or available}


class _ReducedLosses(keras.losses.Loss):
    """Reduction of computed losses, which excludes padding rows as all Keras losses do."""

    def call(self, y_true: object, y_pred: object) -> Any:
        return y_pred


def _weight_column(column: Any) -> NumericColumn | None:
    if isinstance(column, str):
        return numeric_column(column)
    wanted = "the name of a feature or a numeric column"
    check_type("weight_column", column, NumericColumn | None, wanted)
    return column


def _arguments_of(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    names = tuple(inspect.signature(loss_fn).parameters)
    if not {"labels", "logits"} <= set(names) or set(names) - set(_LOSS_ARGUMENTS):
        raise ValueError(
            explain(
                f"loss_fn takes the arguments {list(names)}.",
                expected="labels, logits and optionally features.",
                fix="write it as def loss_fn(labels, logits).",
            )
        )
    return names


# RegressionHead: regression with squared error.


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

    def __init__(
        self,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        loss_fn: Callable[..., Any] | None = None,
        inverse_link_fn: Callable[[Any], Any] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(weight_column, loss_reduction, loss_fn, name)
        check_number("label_dimension", label_dimension, 1, or_none=False)
        self._dimension = label_dimension
        self._inverse_link_fn = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        """One logit per value of a label."""
        return self._dimension

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32."""
        return np.asarray(labels).astype(np.float32)

    def predictions(self, logits: object, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns predictions, and logits if they differ."""
        logits = self._checked_logits(logits)
        if self._inverse_link_fn is None:
            available: dict[str, Callable[[], Any]] = {"predictions": lambda: logits}
        else:
            link = self._inverse_link_fn
            available = {"predictions": lambda: link(logits), "logits": lambda: logits}
        return select(available, keys)

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Creates the average loss, and means of labels and predictions."""
        keys = ["average_loss", "prediction/mean", "label/mean"]
        if regularization_losses is not None:
            keys.append("regularization_loss")
        return {self._key(key): keras.metrics.Mean(name=key.replace("/", "_")) for key in keys}

    def _metric_values(self, logits: jax.Array, labels: jax.Array) -> dict[str, tuple[Any, ...]]:
        predictions = self.predictions(logits)["predictions"]
        return {"prediction/mean": (predictions,), "label/mean": (labels,)}

    def _processed_labels(self, logits: jax.Array, labels: object) -> Any:
        return keras.ops.cast(matching_labels(labels, logits, self._dimension), "float32")

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return keras.ops.square(labels - logits)

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        value = RegressionOutput(predictions["predictions"])
        return {
            "serving_default": value,
            "regression": value,
            "predict": PredictOutput(predictions),
        }

    @property
    def _max_weights_per_example(self) -> int:
        return self._dimension


# PoissonRegressionHead and LogisticRegressionHead: counts and proportions.


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
        weight_column: str | NumericColumn | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        compute_full_loss: bool = True,
        name: str | None = None,
    ) -> None:
        super().__init__(
            label_dimension, weight_column, loss_reduction, inverse_link_fn=jnp.exp, name=name
        )
        self._compute_full_loss = compute_full_loss

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are not negative."""
        counts = super().encode_labels(labels)
        if np.any(counts < 0):
            raise ValueError(
                explain(
                    f"Labels of a Poisson regression include {counts.min()}.",
                    expected="counts of at least 0.",
                    fix="use a RegressionHead for other numbers.",
                )
            )
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
        weight_column: str | NumericColumn | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        name: str | None = None,
    ) -> None:
        super().__init__(
            label_dimension,
            weight_column,
            loss_reduction,
            inverse_link_fn=jax.nn.sigmoid,
            name=name,
        )

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32 and checks that they are from 0 to 1."""
        proportions = super().encode_labels(labels)
        if np.any((proportions < 0) | (proportions > 1)):
            raise ValueError(
                explain(
                    f"Labels of a logistic regression range from {proportions.min()} to "
                    f"{proportions.max()}.",
                    expected="proportions from 0 to 1.",
                    fix="divide the labels by their totals.",
                )
            )
        return proportions

    def _own_loss(self, labels: jax.Array, logits: jax.Array) -> Any:
        return jnp.logaddexp(0.0, logits) - labels * logits
