"""The head for one class out of two."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

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

__all__ = ["BinaryClassHead"]


class BinaryClassHead(ClassHead):
    """The head of models that tell two classes apart: sigmoid cross-entropy of one logit.

    Args:
        weight_column: name of the feature that weighs examples, or a numeric column.
        thresholds: numbers between 0 and 1; accuracy, precision and recall are evaluated for each.
        label_vocabulary: two strings, where labels are strings; else labels are 0 and 1.
        loss_reduction: "sum_over_batch_size" or "sum".
        loss_fn: losses of one's own, a function of labels and logits, and features.
        name: put behind the names of metrics.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: thresholds out of range, or one of the other arguments.

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
                    f"thresholds={self._thresholds} was given.",
                    expected="numbers between 0 and 1.",
                    fix="pass probabilities, such as [0.5, 0.9].",
                )
            )

    @property
    def logits_dimension(self) -> int:
        """One logit."""
        return 1

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
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
        """Makes accuracy, precision, recall, auc and means of labels and predictions."""
        metrics = keras.metrics
        made: dict[str, Any] = {
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
            made["regularization_loss"] = metrics.Mean(name="regularization_loss")
        for number, threshold in enumerate(self._thresholds):
            at = f"positive_threshold_{threshold:g}"
            made |= {
                f"accuracy/{at}": metrics.BinaryAccuracy(f"accuracy_{number}", threshold=threshold),
                f"precision/{at}": metrics.Precision(threshold, name=f"precision_{number}"),
                f"recall/{at}": metrics.Recall(threshold, name=f"recall_{number}"),
            }
        return {self._key(key): metric for key, metric in made.items()}

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
        labels = self._processed_labels(logits, labels)
        predicted = self.predictions(logits, ["class_ids", "logistic"])
        class_ids, logistic = (
            keras.ops.cast(predicted["class_ids"], "float32"),
            predicted["logistic"],
        )

        def update(key: str, *values: Any) -> None:
            eval_metrics[self._key(key)].update_state(*values, sample_weight=weights)

        update("average_loss", losses)
        for key in ("accuracy", "precision", "recall"):
            update(key, labels, class_ids)
        update("prediction/mean", logistic)
        update("label/mean", labels)
        update("accuracy_baseline", labels)
        at = [f"positive_threshold_{threshold:g}" for threshold in self._thresholds]
        by_threshold = [
            f"{kind}/{one}" for one in at for kind in ("accuracy", "precision", "recall")
        ]
        for key in ("auc", "auc_precision_recall", *by_threshold):
            update(key, labels, logistic)
        if regularization_losses is not None:
            added = sum(regularization_losses)
            eval_metrics[self._key("regularization_loss")].update_state(added)
        return eval_metrics

    def _processed_labels(self, logits: Any, labels: Any) -> Any:
        labels = matching_labels(labels, logits, 1)
        check_range(labels, 2)
        return keras.ops.cast(labels, "float32")

    def _own_loss(self, labels: Any, logits: Any) -> Any:
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
    """The accuracy of always saying the more frequent of the labels 0 and 1."""

    def result(self) -> Any:
        mean: Any = super().result()
        return keras.ops.where(self.count > 0, keras.ops.maximum(mean, 1 - mean), 0.0)
