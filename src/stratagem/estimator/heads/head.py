"""What every head does: from logits to loss, predictions, metrics and an EstimatorSpec."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np

from stratagem.estimator.exporting.export_output import ExportOutput
from stratagem.estimator.feature_column.numeric import NumericColumn, numeric_column
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.train_op import minimize
from stratagem.keras.step_mode import StepMode, current_mode, example_fraction, replica_context
from stratagem.messages import explain

__all__ = ["Head"]

_LOSS_ARGUMENTS = ("labels", "logits", "features")


class Head(abc.ABC):
    """The top of a model: what a model function makes of logits.

    Args:
        weight_column: name of the feature that weighs examples, or a numeric column; None for none.
        loss_reduction: "sum_over_batch_size", the sum over the number of losses, or "sum".
        loss_fn: called with labels and logits, and features if it has that argument; returns losses
            of shape (batch, 1), or of the labels. None for the head's own.
        name: put behind the names of metrics, after a slash.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: another reduction, or a `loss_fn` of other arguments.

    Source: tensorflow/estimator base_head.py, Head.
    """

    def __init__(
        self,
        weight_column: str | NumericColumn | None,
        loss_reduction: str,
        loss_fn: Callable[..., Any] | None,
        name: str | None,
    ) -> None:
        if loss_reduction not in ("sum", "sum_over_batch_size"):
            raise ValueError(
                explain(
                    f"loss_reduction={loss_reduction!r} was given to a head.",
                    expected="'sum_over_batch_size' or 'sum'.",
                    fix="leave it out for the average over the batch.",
                )
            )
        self._loss_reduction = loss_reduction
        self._loss_fn_arguments = () if loss_fn is None else _arguments_of(loss_fn)
        self._loss_fn = loss_fn
        self._name = name
        self.weight_column = _weight_column(weight_column)

    @property
    def name(self) -> str | None:
        """The name that was given."""
        return self._name

    @property
    def loss_reduction(self) -> str:
        """How losses of examples become one."""
        return self._loss_reduction

    @property
    @abc.abstractmethod
    def logits_dimension(self) -> int:
        """Size of the last axis of logits."""

    @abc.abstractmethod
    def encode_labels(self, labels: Any) -> np.ndarray:
        """Does what has to be done with labels on the host: strings become ids, ranges are checked.

        Pre-made estimators do it by themselves; other input functions call it where labels are
        strings.
        """

    @abc.abstractmethod
    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns what the model says, by TensorFlow's names.

        Args:
            logits: shape (batch, logits_dimension).
            keys: which predictions; None for all.

        Returns:
            Dict of arrays. Names of classes are ids here; `decode` makes strings of them.
        """

    @abc.abstractmethod
    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Makes the Keras metrics of an evaluation, by TensorFlow's names."""

    @abc.abstractmethod
    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Mapping[str, Any],
        logits: Any,
        labels: Any,
        regularization_losses: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Updates what `metrics` made with a batch, and returns it."""

    @abc.abstractmethod
    def _processed_labels(self, logits: Any, labels: Any) -> Any:
        """Labels as the loss reads them, of rank 2."""

    @abc.abstractmethod
    def _own_loss(self, labels: Any, logits: Any) -> Any:
        """Losses of examples, of rank 2."""

    @abc.abstractmethod
    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        """What an export gives, by signature."""

    def decode(self, predictions: dict[str, Any]) -> dict[str, Any]:
        """Makes strings of the names of classes, on the host.

        Args:
            predictions: those of a batch, as NumPy arrays.
        """
        return predictions

    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Mapping[str, Any] | None = None,
        mode: str | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> Any:
        """Returns the loss of a batch, with regularization.

        Args:
            labels: shape (batch, label dimension), or (batch,).
            logits: shape (batch, logits_dimension).
            features: of the batch, for weights.
            mode: has no influence.
            regularization_losses: scalars to be added.

        Returns:
            A scalar. In a step of an Estimator its average over replicas is the loss of one device.
        """
        del mode
        logits = self._checked_logits(logits)
        losses, weights = self._losses_and_weights(logits, labels, features or {})
        total: Any = _ReducedLosses(reduction=self._loss_reduction)(
            keras.ops.zeros_like(losses), losses, weights
        )
        if self._loss_reduction == "sum":
            total = _as_average_over_replicas(total)
        return total + sum(regularization_losses or ())

    def create_estimator_spec(
        self,
        features: Mapping[str, Any],
        mode: str,
        logits: Any,
        labels: Any = None,
        optimizer: Any = None,
        trainable_variables: Sequence[Any] | None = None,
        train_op_fn: Callable[[Any], Any] | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> EstimatorSpec:
        """Makes what a model function returns.

        Args:
            features: of the batch.
            mode: one of `ModeKeys`.
            logits: shape (batch, logits_dimension).
            labels: for training and evaluation.
            optimizer: the Keras optimizer of training.
            trainable_variables: what it trains; None for all.
            train_op_fn: instead, called with the loss, returns the `train_op`.
            regularization_losses: scalars to be added to the loss.

        Returns:
            The spec.

        Raises:
            ValueError: neither or both of optimizer and `train_op_fn` for training.
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
        if (optimizer is None) == (train_op_fn is None):
            raise ValueError(
                explain(
                    f"create_estimator_spec received optimizer={optimizer!r} and "
                    f"train_op_fn={train_op_fn!r} for training.",
                    expected="one of them.",
                    fix="pass a Keras optimizer.",
                )
            )
        if train_op_fn is None:
            train_op = minimize(optimizer, loss, trainable_variables)
        else:
            train_op = train_op_fn(loss)
        return EstimatorSpec(mode, predictions=predictions, loss=loss, train_op=train_op)

    def _key(self, key: str) -> str:
        return f"{key}/{self._name}" if self._name else key

    def _checked_logits(self, logits: Any) -> Any:
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
        self, logits: Any, labels: Any, features: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Losses of examples, of rank 2, and weights that broadcast against them or None."""
        labels = self._processed_labels(logits, labels)
        own = self._own_loss(labels, logits)
        losses = own
        if self._loss_fn is not None:
            given = {"features": features} if "features" in self._loss_fn_arguments else {}
            losses = jnp.asarray(self._loss_fn(labels=labels, logits=logits, **given), "float32")
            if losses.shape != own.shape:
                raise ValueError(
                    explain(
                        f"loss_fn returned shape {tuple(losses.shape)}.",
                        expected=f"shape {tuple(own.shape)}: losses of the examples.",
                        fix="do not reduce them; keep the last axis.",
                    )
                )
        return losses, self._weights(features, logits)

    def _weights(self, features: Mapping[str, Any], logits: Any) -> Any:
        if self.weight_column is None:
            return None
        if self.weight_column.size not in (1, self._weights_an_example):
            raise ValueError(
                explain(
                    f"weight_column has {self.weight_column.size} numbers an example.",
                    expected=f"1 or {self._weights_an_example}.",
                    fix="pass the name of a feature with one number an example.",
                )
            )
        return self.weight_column.numbers(features)

    @property
    def _weights_an_example(self) -> int:
        """Weights that an example may have where it has not one."""
        return 1


class _ReducedLosses(keras.losses.Loss):
    """Losses that are computed already: Keras's seam leaves out rows that only pad."""

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return y_pred


def _as_average_over_replicas(total: Any) -> Any:
    """Scales a replica's sum so that the average by true examples is the sum over replicas."""
    context = replica_context()
    if context is None or current_mode() is not StepMode.MEAN:
        return total
    fraction = example_fraction(context, total.dtype)
    return jnp.where(fraction > 0, total / jnp.where(fraction > 0, fraction, 1), 0)


def _weight_column(column: Any) -> NumericColumn | None:
    if isinstance(column, str):
        return numeric_column(column)
    if column is not None and not isinstance(column, NumericColumn):
        raise TypeError(
            explain(
                f"weight_column={column!r} is of type {type(column).__name__}.",
                expected="the name of a feature, or a numeric column.",
                fix="pass the name.",
            )
        )
    return column


def _arguments_of(loss_fn: Callable[..., Any]) -> tuple[str, ...]:
    names = tuple(inspect.signature(loss_fn).parameters)
    if not {"labels", "logits"} <= set(names) or set(names) - set(_LOSS_ARGUMENTS):
        raise ValueError(
            explain(
                f"loss_fn takes the arguments {list(names)}.",
                expected=f"labels and logits, of the arguments {list(_LOSS_ARGUMENTS)}.",
                fix="write it as def loss_fn(labels, logits).",
            )
        )
    return names
