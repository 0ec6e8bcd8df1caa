"""Linear model Estimators."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.classification import binary_or_multi_class_head
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.estimator.premade.premade_estimator import (
    LinearNetwork,
    OptimizerLike,
    PremadeEstimator,
    checked_columns,
    optimizer_factory,
)
from stratagem.estimator.settings.run_config import RunConfig

_LEARNING_RATE = 0.2


class LinearEstimator(PremadeEstimator):
    """Linear model with a given head.

    Args:
        head: computes loss, predictions and metrics from the logits.
        feature_columns: any columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with a learning rate of 0.2; a
            Keras optimizer; or a function that creates one, called in the model function.
        config: a `RunConfig`, which also holds the strategies.
        sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".
        warm_start_from: as for `Estimator`.

    Raises:
        ValueError: if columns or optimizer are invalid.

    Example:
        >>> estimator = sg.estimator.LinearEstimator(
        ...     sg.estimator.RegressionHead(), [sg.feature_column.numeric_column("x")],
        ...     optimizer=lambda: keras.optimizers.SGD(0.5))
        >>> data = lambda: ({"x": np.array([0.0, 1.0])}, np.array([1.0, 3.0]))
        >>> _ = estimator.train(data, steps=200)
        >>> [round(float(row["predictions"][0]), 2) for row in estimator.predict(data)]
        [1.0, 3.0]

    Source: tensorflow/estimator canned/linear.py, LinearEstimatorV2.
    """

    def __init__(
        self,
        head: Head,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
        warm_start_from: object = None,
    ) -> None:
        network = LinearNetwork(
            feature_columns=checked_columns(feature_columns), sparse_combiner=sparse_combiner
        )
        networks = [(network, optimizer_factory(optimizer, _LEARNING_RATE))]
        super().__init__(head, networks, model_dir, config, warm_start_from)


class LinearClassifier(LinearEstimator):
    """Linear classifier.

    Args:
        feature_columns: any columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        optimizer: as for `LinearEstimator`.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> city = sg.feature_column.categorical_column_with_hash_bucket("city", 100)
        >>> classifier = sg.estimator.LinearClassifier([city])
        >>> data = lambda: ({"city": np.array(["Rome", "Paris"])}, np.array([0, 1]))
        >>> float(classifier.train(data, steps=20).evaluate(data, steps=1)["accuracy"])
        1.0

    Source: tensorflow/estimator canned/linear.py, LinearClassifierV2.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            feature_columns,
            model_dir=model_dir,
            optimizer=optimizer,
            config=config,
            sparse_combiner=sparse_combiner,
            warm_start_from=warm_start_from,
        )


class LinearRegressor(LinearEstimator):
    """Linear regressor.

    Args:
        feature_columns: any columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        optimizer: as for `LinearEstimator`.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> x = sg.feature_column.numeric_column("x")
        >>> regressor = sg.estimator.LinearRegressor([x], optimizer="SGD")
        >>> data = lambda: ({"x": np.array([0.0, 1.0])}, np.array([1.0, 3.0]))
        >>> _ = regressor.train(data, steps=100)
        >>> [round(float(row["predictions"][0]), 2) for row in regressor.predict(data)]
        [1.0, 3.0]

    Source: tensorflow/estimator canned/linear.py, LinearRegressorV2.
    """

    def __init__(
        self,
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            feature_columns,
            model_dir=model_dir,
            optimizer=optimizer,
            config=config,
            sparse_combiner=sparse_combiner,
            warm_start_from=warm_start_from,
        )
