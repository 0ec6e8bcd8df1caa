"""Pre-made estimators that look at no feature: what every other model has to be better than."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal

import keras

from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads import Head, RegressionHead, binary_or_multi_class_head
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.premade.optimizers import OptimizerLike, optimizer_maker
from stratagem.estimator.premade.premade_estimator import EXAMPLES, PremadeEstimator
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec

__all__ = ["BaselineClassifier", "BaselineEstimator", "BaselineRegressor"]

_LEARNING_RATE = 0.3


class _Bias(keras.layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__(name="baseline")
        self._units = units

    def build(self, input_shape: Any) -> None:
        del input_shape
        self.bias = self.add_weight(shape=(self._units,), initializer="zeros", name="bias")

    def call(self, examples: Any) -> Any:
        return keras.ops.ones_like(keras.ops.expand_dims(examples, 1)) * self.bias


class BaselineEstimator(PremadeEstimator):
    """Logits that are the same for every example, with a head of one's choice.

    Args:
        head: what is made of logits.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with a learning rate of 0.3; or a
            Keras optimizer; or a function that makes one, called in the model function.
        config: a `RunConfig`, with the strategies.

    Raises:
        ValueError: an unknown optimizer.

    Source: tensorflow/estimator canned/baseline.py, BaselineEstimatorV2.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        new_optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            layer = _Bias(head.logits_dimension)
            logits = layer(features[EXAMPLES])
            return head.create_estimator_spec(
                features,
                mode,
                logits,
                labels,
                optimizer=new_optimizer() if mode == ModeKeys.TRAIN else None,
                trainable_variables=layer.trainable_variables,
            )

        super().__init__(model_fn, head, [], model_dir, config, None)


class BaselineClassifier(BaselineEstimator):
    """Predicts how frequent each class is, for every example.

    Args:
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        n_classes: number of classes.
        weight_column: name of the feature that weighs examples, or a numeric column.
        label_vocabulary: one string a class, where labels are strings.
        optimizer: as of `BaselineEstimator`.
        config: a `RunConfig`, with the strategies.
        loss_reduction: "sum_over_batch_size" or "sum".

    Raises:
        ValueError: an argument that cannot be.

    Example:
        >>> classifier = sg.estimator.BaselineClassifier()
        >>> data = lambda: ({"x": np.zeros(4)}, np.array([1, 1, 1, 0]))
        >>> _ = classifier.train(data, steps=200)
        >>> [round(float(p), 2) for p in next(classifier.predict(data))["probabilities"]]
        [0.25, 0.75]

    Source: tensorflow/estimator canned/baseline.py, BaselineClassifierV2.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
    ) -> None:
        head = binary_or_multi_class_head(
            n_classes, weight_column, label_vocabulary, loss_reduction
        )
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """Predicts the mean of the labels for every example.

    Args:
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        label_dimension: numbers that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        optimizer: as of `BaselineEstimator`.
        config: a `RunConfig`, with the strategies.
        loss_reduction: "sum_over_batch_size" or "sum".

    Raises:
        ValueError: an argument that cannot be.

    Example:
        >>> regressor = sg.estimator.BaselineRegressor(optimizer="SGD")
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1.0, 3.0]))
        >>> _ = regressor.train(data, steps=50)
        >>> [round(float(row["predictions"][0]), 2) for row in regressor.predict(data)]
        [2.0, 2.0]

    Source: tensorflow/estimator canned/baseline.py, BaselineRegressorV2.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)
