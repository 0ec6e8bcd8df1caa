"""Wide-and-deep Estimators: a linear model plus a deep network."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from stratagem.errors import explain
from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.classification import binary_or_multi_class_head
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.estimator.premade.premade_estimator import (
    DeepNetwork,
    LinearNetwork,
    Network,
    OptimizerLike,
    PremadeEstimator,
    checked_columns,
    optimizer_factory,
)
from stratagem.estimator.settings.run_config import RunConfig

_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005


class DNNLinearCombinedEstimator(PremadeEstimator):
    """Linear model plus deep network, with a given head.

    The logits of both are added. Each of the two has its own optimizer; both minimize the same
    loss.

    Args:
        head: computes loss, predictions and metrics from the logits.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        linear_feature_columns: columns of the linear model; None to leave it out.
        linear_optimizer: a name, with a learning rate of 0.005, or 1/sqrt(number of columns) if
            that is smaller; a Keras optimizer; or a function that creates one.
        dnn_feature_columns: dense columns of the deep network; None to leave it out.
        dnn_optimizer: in the same form; a name has a learning rate of 0.001.
        dnn_hidden_units: the number of units of each hidden layer.
        dnn_activation_fn: the activation of hidden layers.
        dnn_dropout: the fraction of hidden outputs to drop in training; None for none.
        config: a `RunConfig`, which also holds the strategies.
        batch_norm: True to normalize the outputs of hidden layers.
        linear_sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".
        warm_start_from: as for `Estimator`.

    Raises:
        ValueError: if there are no columns at all, or dense columns without hidden units, or
            another argument is invalid.

    Example:
        >>> x = sg.feature_column.numeric_column("x")
        >>> estimator = sg.estimator.DNNLinearCombinedEstimator(
        ...     sg.estimator.RegressionHead(), linear_feature_columns=[x], dnn_feature_columns=[x],
        ...     dnn_hidden_units=[4], linear_optimizer=lambda: keras.optimizers.SGD(0.1),
        ...     config=sg.estimator.RunConfig(tf_random_seed=0))
        >>> data = lambda: ({"x": np.array([0.0, 1.0])}, np.array([1.0, 3.0]))
        >>> bool(estimator.train(data, steps=200).evaluate(data, steps=1)["loss"] < 0.1)
        True

    Source: tensorflow/estimator canned/dnn_linear_combined.py, DNNLinearCombinedEstimatorV2.
    """

    def __init__(
        self,
        head: Head,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: str | Callable[[Any], Any] | None = "relu",
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
        warm_start_from: object = None,
    ) -> None:
        wide_columns = checked_columns(linear_feature_columns or None)
        deep_columns = checked_columns(dnn_feature_columns or None)
        _check_parts(wide_columns, deep_columns, dnn_hidden_units)
        wide = LinearNetwork(feature_columns=wide_columns, sparse_combiner=linear_sparse_combiner)
        deep = DeepNetwork(
            feature_columns=deep_columns,
            hidden_units=tuple(dnn_hidden_units or (1,)),
            activation_fn=dnn_activation_fn,
            dropout=dnn_dropout,
            batch_norm=batch_norm,
        )
        rate = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(len(wide_columns) or 1))
        networks: list[tuple[Network, Callable[[], Any]]] = []
        if deep_columns:
            networks.append((deep, optimizer_factory(dnn_optimizer, _DNN_LEARNING_RATE)))
        if wide_columns:
            networks.append((wide, optimizer_factory(linear_optimizer, rate)))
        super().__init__(head, networks, model_dir, config, warm_start_from)


def _check_parts(wide: object, deep: object, hidden_units: object) -> None:
    if not wide and not deep:
        raise ValueError(
            explain(
                "Neither linear_feature_columns nor dnn_feature_columns are set.",
                expected="columns for the linear model, the deep network, or both.",
                fix="pass at least one of them.",
            )
        )
    if deep and not hidden_units:
        raise ValueError(
            explain(
                f"dnn_feature_columns are set, but dnn_hidden_units={hidden_units}.",
                expected="the number of units of each hidden layer.",
                fix="pass dnn_hidden_units=[64, 32], for example.",
            )
        )


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """Wide-and-deep classifier: a linear model plus a deep network.

    Args:
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        linear_feature_columns: columns of the linear model.
        linear_optimizer: as for `DNNLinearCombinedEstimator`.
        dnn_feature_columns: dense columns of the deep network.
        dnn_optimizer: as for `DNNLinearCombinedEstimator`.
        dnn_hidden_units: the number of units of each hidden layer.
        dnn_activation_fn: the activation of hidden layers.
        dnn_dropout: the fraction of hidden outputs to drop in training; None for none.
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: True to normalize the outputs of hidden layers.
        linear_sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> city = sg.feature_column.categorical_column_with_hash_bucket("city", 100)
        >>> classifier = sg.estimator.DNNLinearCombinedClassifier(
        ...     linear_feature_columns=[city],
        ...     dnn_feature_columns=[sg.feature_column.embedding_column(city, dimension=4)],
        ...     dnn_hidden_units=[8], dnn_optimizer=lambda: keras.optimizers.Adam(0.1))
        >>> data = lambda: ({"city": np.array(["Rome", "Paris"])}, np.array([0, 1]))
        >>> float(classifier.train(data, steps=20).evaluate(data, steps=1)["accuracy"])
        1.0

    Source: tensorflow/estimator canned/dnn_linear_combined.py, DNNLinearCombinedClassifierV2.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: str | Callable[[Any], Any] | None = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            model_dir=model_dir,
            linear_feature_columns=linear_feature_columns,
            linear_optimizer=linear_optimizer,
            dnn_feature_columns=dnn_feature_columns,
            dnn_optimizer=dnn_optimizer,
            dnn_hidden_units=dnn_hidden_units,
            dnn_activation_fn=dnn_activation_fn,
            dnn_dropout=dnn_dropout,
            config=config,
            batch_norm=batch_norm,
            linear_sparse_combiner=linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
    """Wide-and-deep regressor: a linear model plus a deep network.

    Args:
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        linear_feature_columns: columns of the linear model.
        linear_optimizer: as for `DNNLinearCombinedEstimator`.
        dnn_feature_columns: dense columns of the deep network.
        dnn_optimizer: as for `DNNLinearCombinedEstimator`.
        dnn_hidden_units: the number of units of each hidden layer.
        dnn_activation_fn: the activation of hidden layers.
        dnn_dropout: the fraction of hidden outputs to drop in training; None for none.
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: True to normalize the outputs of hidden layers.
        linear_sparse_combiner: how to combine the weights of several ids: "sum", "mean" or "sqrtn".

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> x = sg.feature_column.numeric_column("x")
        >>> regressor = sg.estimator.DNNLinearCombinedRegressor(
        ...     linear_feature_columns=[x], linear_optimizer=lambda: keras.optimizers.SGD(0.1),
        ...     dnn_feature_columns=[x], dnn_hidden_units=[4],
        ...     config=sg.estimator.RunConfig(tf_random_seed=0))
        >>> data = lambda: ({"x": np.array([0.0, 1.0])}, np.array([1.0, 3.0]))
        >>> bool(regressor.train(data, steps=200).evaluate(data, steps=1)["loss"] < 0.1)
        True

    Source: tensorflow/estimator canned/dnn_linear_combined.py, DNNLinearCombinedRegressorV2.
    """

    def __init__(
        self,
        model_dir: str | os.PathLike[str] | None = None,
        linear_feature_columns: Iterable[FeatureColumn] | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Iterable[FeatureColumn] | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: str | Callable[[Any], Any] | None = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: Literal["sum", "mean", "sqrtn"] = "sum",
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            model_dir=model_dir,
            linear_feature_columns=linear_feature_columns,
            linear_optimizer=linear_optimizer,
            dnn_feature_columns=dnn_feature_columns,
            dnn_optimizer=dnn_optimizer,
            dnn_hidden_units=dnn_hidden_units,
            dnn_activation_fn=dnn_activation_fn,
            dnn_dropout=dnn_dropout,
            config=config,
            batch_norm=batch_norm,
            linear_sparse_combiner=linear_sparse_combiner,
            warm_start_from=warm_start_from,
        )
