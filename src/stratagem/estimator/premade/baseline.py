"""Baseline Estimators, which ignore all features."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.classification import binary_or_multi_class_head
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.estimator.premade.premade_estimator import (
    BiasNetwork,
    OptimizerLike,
    PremadeEstimator,
    optimizer_factory,
)
from stratagem.estimator.settings.run_config import RunConfig

_LEARNING_RATE = 0.3


class BaselineEstimator(PremadeEstimator):
    """Predicts the same logits for every example, with a given head.

    Args:
        head: computes loss, predictions and metrics from the logits.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with a learning rate of 0.3; a
            Keras optimizer; or a function that creates one, called in the model function.
        config: a `RunConfig`, which also holds the strategies.

    Raises:
        ValueError: if the optimizer is unknown.

    Example:
        >>> head = sg.estimator.RegressionHead()
        >>> estimator = sg.estimator.BaselineEstimator(head, optimizer="SGD")
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1.0, 3.0]))
        >>> _ = estimator.train(data, steps=50)
        >>> round(float(next(estimator.predict(data))["predictions"][0]), 2)
        2.0

    Source: tensorflow/estimator canned/baseline.py, BaselineEstimatorV2.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        networks = [(BiasNetwork(), optimizer_factory(optimizer, _LEARNING_RATE))]
        super().__init__(head, networks, model_dir, config, None)


class BaselineClassifier(BaselineEstimator):
    """Predicts the class frequencies of the training data for every example.

    Args:
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        optimizer: as for `BaselineEstimator`.
        config: a `RunConfig`, which also holds the strategies.
        loss_reduction: "sum_over_batch_size" or "sum".

    Raises:
        ValueError: if an argument is invalid.

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
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        optimizer: as for `BaselineEstimator`.
        config: a `RunConfig`, which also holds the strategies.
        loss_reduction: "sum_over_batch_size" or "sum".

    Raises:
        ValueError: if an argument is invalid.

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
