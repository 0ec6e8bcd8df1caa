"""Pre-made estimators of linear models."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads import Head, RegressionHead, binary_or_multi_class_head
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.premade.networks import LinearNetwork
from stratagem.estimator.premade.optimizers import OptimizerLike, optimizer_maker
from stratagem.estimator.premade.premade_estimator import PremadeEstimator, columns_of
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec

__all__ = ["LinearClassifier", "LinearEstimator", "LinearRegressor"]

_LEARNING_RATE = 0.2


class LinearEstimator(PremadeEstimator):
    """A linear model with a head of one's choice.

    Args:
        head: what is made of logits.
        feature_columns: any columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with a learning rate of 0.2; or a
            Keras optimizer; or a function that makes one, called in the model function.
        config: a `RunConfig`, with the strategies.
        sparse_combiner: what is made of the weights of several ids: "sum", "mean" or "sqrtn".
        warm_start_from: as of `Estimator`.

    Raises:
        ValueError: columns that cannot be; an unknown optimizer.

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
        warm_start_from: Any = None,
    ) -> None:
        network = LinearNetwork(
            feature_columns=columns_of(feature_columns), sparse_combiner=sparse_combiner
        )
        new_optimizer = optimizer_maker(optimizer, _LEARNING_RATE)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            logits, variables = network.logits(features, head.logits_dimension)
            training = mode == ModeKeys.TRAIN
            return head.create_estimator_spec(
                features,
                mode,
                logits,
                labels,
                optimizer=new_optimizer() if training else None,
                trainable_variables=variables,
            )

        groups = [network.feature_columns]
        super().__init__(model_fn, head, groups, model_dir, config, warm_start_from)


class LinearClassifier(LinearEstimator):
    """A linear model that tells classes apart.

    Args:
        feature_columns: any columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        n_classes: number of classes.
        weight_column: name of the feature that weighs examples, or a numeric column.
        label_vocabulary: one string a class, where labels are strings.
        optimizer: as of `LinearEstimator`.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        sparse_combiner: what is made of the weights of several ids.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
    """A linear model that predicts numbers.

    Args:
        feature_columns: any columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        label_dimension: numbers that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        optimizer: as of `LinearEstimator`.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        sparse_combiner: what is made of the weights of several ids.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
