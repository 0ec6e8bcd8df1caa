"""The head for one class out of many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import keras

from stratagem.estimator.exporting.export_output import ExportOutput, PredictOutput
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.binary_class import BinaryClassHead
from stratagem.estimator.heads.class_head import ClassHead
from stratagem.estimator.heads.labels import check_range, matching_labels
from stratagem.estimator.heads.prediction_keys import select
from stratagem.messages import explain

__all__ = ["MultiClassHead", "binary_or_multi_class_head"]


class MultiClassHead(ClassHead):
    """The head of models that tell more than two classes apart: softmax cross-entropy.

    Args:
        n_classes: number of classes, at least 3.
        weight_column: name of the feature that weighs examples, or a numeric column.
        label_vocabulary: one string a class, where labels are strings; else labels are ids.
        loss_reduction: "sum_over_batch_size" or "sum".
        loss_fn: losses of one's own, a function of labels and logits, and features.
        name: put behind the names of metrics.

    Raises:
        TypeError: a `weight_column` of another type.
        ValueError: fewer classes, or one of the other arguments.

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
                    expected="an integer above 2.",
                    fix="use BinaryClassHead for two classes.",
                )
            )
        super().__init__(n_classes, weight_column, label_vocabulary, loss_reduction, loss_fn, name)

    @property
    def logits_dimension(self) -> int:
        """One logit a class."""
        return self._n_classes

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[str, Any]:
        """Returns logits, probabilities, class_ids, classes and those of all classes."""
        logits = self._checked_logits(logits)
        available: dict[str, Callable[[], Any]] = {
            "logits": lambda: logits,
            **self._class_predictions(logits, logits),
        }
        return select(available, keys)

    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, Any]:
        """Makes accuracy and the average loss."""
        made: dict[str, Any] = {
            "average_loss": keras.metrics.Mean(name="average_loss"),
            "accuracy": keras.metrics.Accuracy(name="accuracy"),
        }
        if regularization_losses is not None:
            made["regularization_loss"] = keras.metrics.Mean(name="regularization_loss")
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
        class_ids = self.predictions(logits, ["class_ids"])["class_ids"]
        eval_metrics[self._key("average_loss")].update_state(losses, sample_weight=weights)
        eval_metrics[self._key("accuracy")].update_state(
            self._processed_labels(logits, labels), class_ids, sample_weight=weights
        )
        if regularization_losses is not None:
            added = sum(regularization_losses)
            eval_metrics[self._key("regularization_loss")].update_state(added)
        return eval_metrics

    def _processed_labels(self, logits: Any, labels: Any) -> Any:
        labels = matching_labels(labels, logits, 1)
        if keras.backend.standardize_dtype(labels.dtype)[:3] not in ("int", "uin"):
            raise ValueError(
                explain(
                    f"labels have dtype {labels.dtype}.",
                    expected="integers, the ids of classes.",
                    fix="cast them to int32, or pass label_vocabulary for strings.",
                )
            )
        check_range(labels, self._n_classes)
        return keras.ops.cast(labels, "int32")

    def _own_loss(self, labels: Any, logits: Any) -> Any:
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
    """Makes the head for a number of classes.

    Source: tensorflow/estimator head_utils.py, binary_or_multi_class_head.
    """
    if n_classes == 2:
        return BinaryClassHead(
            weight_column, label_vocabulary=label_vocabulary, loss_reduction=loss_reduction
        )
    return MultiClassHead(n_classes, weight_column, label_vocabulary, loss_reduction)
