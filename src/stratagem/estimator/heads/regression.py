"""The head for numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras
import numpy as np

from stratagem.estimator.exporting.export_output import (
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.labels import matching_labels
from stratagem.estimator.heads.prediction_keys import select
from stratagem.messages import explain

__all__ = ["RegressionHead"]


class RegressionHead(Head):
    """The head of models that predict numbers: the squared error.

    Args:
        label_dimension: numbers that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column, which may have
            one number for each of a label's.
        loss_reduction: "sum_over_batch_size", the sum over examples times numbers, or "sum".
        loss_fn: losses of one's own, a function of labels and logits, and features.
        inverse_link_fn: makes predictions of logits; None where they are the same.
        name: put behind the names of metrics.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: no positive dimension, or one of the other arguments.

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
                    fix="pass how many numbers a label has.",
                )
            )
        self._dimension = label_dimension
        self._inverse_link_fn = inverse_link_fn

    @property
    def logits_dimension(self) -> int:
        """One logit a number of a label."""
        return self._dimension

    def encode_labels(self, labels: Any) -> np.ndarray:
        """Returns labels as float32.

        Raises:
            ValueError: labels that are no numbers.
        """
        array = np.asarray(labels)
        if array.dtype.kind not in "biuf":
            raise ValueError(
                explain(
                    f"Labels of a regression have dtype {array.dtype}.",
                    expected="numbers.",
                    fix="use a classifier for labels that are strings.",
                )
            )
        return array.astype(np.float32)

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns predictions, and logits where they differ."""
        logits = self._checked_logits(logits)
        if self._inverse_link_fn is None:
            available: dict[str, Callable[[], Any]] = {"predictions": lambda: logits}
        else:
            link = self._inverse_link_fn
            available = {"predictions": lambda: link(logits), "logits": lambda: logits}
        return select(available, keys)

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Makes the average loss, and means of labels and predictions."""
        keys = ["average_loss", "prediction/mean", "label/mean"]
        if regularization_losses is not None:
            keys.append("regularization_loss")
        return {self._key(key): keras.metrics.Mean(name=key.replace("/", "_")) for key in keys}

    def update_metrics(
        self,
        eval_metrics: dict[str, Any],
        features: Mapping[str, Any],
        logits: Any,
        labels: Any,
        regularization_losses: Sequence[Any] | None = None,
    ) -> dict[str, Any]:
        """Updates what `metrics` made with a batch, and returns it."""
        logits = self._checked_logits(logits)
        losses, weights = self._losses_and_weights(logits, labels, features)
        values = {
            "average_loss": losses,
            "prediction/mean": self.predictions(logits)["predictions"],
            "label/mean": self._processed_labels(logits, labels),
        }
        for key, value in values.items():
            eval_metrics[self._key(key)].update_state(value, sample_weight=weights)
        if regularization_losses is not None:
            added = sum(regularization_losses)
            eval_metrics[self._key("regularization_loss")].update_state(added)
        return eval_metrics

    def _processed_labels(self, logits: Any, labels: Any) -> Any:
        return keras.ops.cast(matching_labels(labels, logits, self._dimension), "float32")

    def _own_loss(self, labels: Any, logits: Any) -> Any:
        return keras.ops.square(labels - logits)

    def _export_outputs(self, predictions: dict[str, Any]) -> dict[str, ExportOutput]:
        value = RegressionOutput(predictions["predictions"])
        return {
            "serving_default": value,
            "regression": value,
            "predict": PredictOutput(predictions),
        }

    @property
    def _weights_an_example(self) -> int:
        return self._dimension
