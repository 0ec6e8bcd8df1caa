"""MultiClassHead: classification with more than two classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import keras

from stratagem.estimator.exporting.export_output import ExportOutput, PredictOutput
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.binary_class import BinaryClassHead
from stratagem.estimator.heads.class_head import ClassHead
from stratagem.estimator.heads.labels import check_range, matching_labels
from stratagem.estimator.heads.prediction_keys import select
from stratagem.messages import explain

if TYPE_CHECKING:
    import jax


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
