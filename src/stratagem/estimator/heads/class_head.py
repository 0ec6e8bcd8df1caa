"""ClassHead: base of classification heads, with class names and ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from stratagem.estimator.exporting.export_output import ClassificationOutput
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.labels import check_vocabulary, class_names, label_ids

if TYPE_CHECKING:
    import jax


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
