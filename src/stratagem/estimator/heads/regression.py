"""RegressionHead: regression with squared error."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.exporting.export_output import (
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.classification import matching_labels, select
from stratagem.estimator.heads.head import Head


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
        if label_dimension < 1:
            raise ValueError(
                explain(
                    f"RegressionHead received label_dimension={label_dimension}.",
                    expected="at least 1.",
                    fix="pass the number of values per label.",
                )
            )
        self._dimension = label_dimension
        self._inverse_link_fn = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        """One logit per value of a label."""
        return self._dimension

    def encode_labels(self, labels: object) -> np.ndarray:
        """Converts labels to float32."""
        array = np.asarray(labels)
        if array.dtype.kind not in "biuf":
            raise ValueError(
                explain(
                    f"Labels of a regression have dtype {array.dtype}.",
                    expected="numbers.",
                    fix="use a classifier for string labels.",
                )
            )
        return array.astype(np.float32)

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
