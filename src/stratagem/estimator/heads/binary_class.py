"""BinaryClassHead: binary classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras

from stratagem.estimator.exporting.export_output import (
    ExportOutput,
    PredictOutput,
    RegressionOutput,
)
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.class_head import ClassHead
from stratagem.estimator.heads.labels import check_range, matching_labels
from stratagem.estimator.heads.prediction_keys import select
from stratagem.messages import explain

if TYPE_CHECKING:
    import jax


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
