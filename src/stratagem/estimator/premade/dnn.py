"""Deep network Estimators."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads.classification import binary_or_multi_class_head
from stratagem.estimator.heads.head import Head
from stratagem.estimator.heads.regression import RegressionHead
from stratagem.estimator.premade.premade_estimator import (
    DeepNetwork,
    OptimizerLike,
    PremadeEstimator,
    checked_columns,
    optimizer_factory,
)
from stratagem.estimator.settings.run_config import RunConfig


class DNNEstimator(PremadeEstimator):
    """Deep network with a given head.

    Args:
        head: computes loss, predictions and metrics from the logits.
        hidden_units: the number of units of each hidden layer.
        feature_columns: dense columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with Keras's learning rate; a
            Keras optimizer; or a function that creates one, called in the model function.
        activation_fn: the activation of hidden layers.
        dropout: the fraction of hidden outputs to drop in training; None for none.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        batch_norm: True to normalize the outputs of hidden layers.

    Raises:
        ValueError: if columns, units, dropout or optimizer are invalid.

    Example:
        >>> estimator = sg.estimator.DNNEstimator(
        ...     sg.estimator.RegressionHead(), hidden_units=[4],
        ...     feature_columns=[sg.feature_column.numeric_column("x")],
        ...     optimizer=lambda: keras.optimizers.SGD(0.1),
        ...     config=sg.estimator.RunConfig(tf_random_seed=0))
        >>> data = lambda: ({"x": np.array([0.0, 1.0])}, np.array([1.0, 3.0]))
        >>> bool(estimator.train(data, steps=100).evaluate(data, steps=1)["loss"] < 0.1)
        True

    Source: tensorflow/estimator canned/dnn.py, DNNEstimatorV2.
    """

    def __init__(
        self,
        head: Head,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: str | Callable[[Any], Any] | None = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        batch_norm: bool = False,
    ) -> None:
        network = DeepNetwork(
            feature_columns=checked_columns(feature_columns),
            hidden_units=tuple(hidden_units),
            activation_fn=activation_fn,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        networks = [(network, optimizer_factory(optimizer))]
        super().__init__(head, networks, model_dir, config, warm_start_from)


class DNNClassifier(DNNEstimator):
    """Deep network classifier.

    Labels are class ids, or strings of `label_vocabulary`. `input_fn` returns strings unchanged;
    they are converted to ids on the host.

    Args:
        hidden_units: the number of units of each hidden layer.
        feature_columns: dense columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        optimizer: as for `DNNEstimator`; Adagrad's default learning rate in Keras is 0.001.
        activation_fn: the activation of hidden layers.
        dropout: the fraction of hidden outputs to drop in training; None for none.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: True to normalize the outputs of hidden layers.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> age = sg.feature_column.numeric_column("age", normalizer_fn=lambda x: x / 100.0)
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> classifier = sg.estimator.DNNClassifier(
        ...     hidden_units=[4], feature_columns=[age], label_vocabulary=["young", "old"],
        ...     optimizer=keras.optimizers.Adam(0.1),
        ...     config=sg.estimator.RunConfig(train_distribute=strategy, tf_random_seed=0))
        >>> features = {"age": np.array([10.0, 20.0, 70.0, 80.0])}
        >>> labels = np.array(["young", "young", "old", "old"])
        >>> _ = classifier.train(lambda: (features, labels), steps=50)
        >>> [row["classes"][0].decode() for row in classifier.predict(lambda: features)]
        ['young', 'young', 'old', 'old']

    Source: tensorflow/estimator canned/dnn.py, DNNClassifierV2.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        n_classes: int = 2,
        weight_column: str | NumericColumn | None = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: str | Callable[[Any], Any] | None = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            binary_or_multi_class_head(n_classes, weight_column, label_vocabulary, loss_reduction),
            hidden_units,
            feature_columns,
            model_dir=model_dir,
            optimizer=optimizer,
            activation_fn=activation_fn,
            dropout=dropout,
            config=config,
            warm_start_from=warm_start_from,
            batch_norm=batch_norm,
        )


class DNNRegressor(DNNEstimator):
    """Deep network regressor.

    Args:
        hidden_units: the number of units of each hidden layer.
        feature_columns: dense columns.
        model_dir: the folder of checkpoints; None for the config's, or a new temporary one.
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        optimizer: as for `DNNEstimator`; Adagrad's default learning rate in Keras is 0.001.
        activation_fn: the activation of hidden layers.
        dropout: the fraction of hidden outputs to drop in training; None for none.
        config: a `RunConfig`, which also holds the strategies.
        warm_start_from: as for `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: True to normalize the outputs of hidden layers.

    Raises:
        ValueError: if an argument is invalid.

    Example:
        >>> x = sg.feature_column.numeric_column("x")
        >>> regressor = sg.estimator.DNNRegressor(hidden_units=[8, 4], feature_columns=[x])
        >>> data = lambda: ({"x": np.arange(4.0)}, np.arange(4.0))
        >>> regressor.train(data, steps=1).evaluate(data, steps=1)["global_step"]
        1

    Source: tensorflow/estimator canned/dnn.py, DNNRegressorV2.
    """

    def __init__(
        self,
        hidden_units: Sequence[int],
        feature_columns: Iterable[FeatureColumn],
        model_dir: str | os.PathLike[str] | None = None,
        label_dimension: int = 1,
        weight_column: str | NumericColumn | None = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: str | Callable[[Any], Any] | None = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Literal["sum", "sum_over_batch_size"] = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        super().__init__(
            RegressionHead(label_dimension, weight_column, loss_reduction),
            hidden_units,
            feature_columns,
            model_dir=model_dir,
            optimizer=optimizer,
            activation_fn=activation_fn,
            dropout=dropout,
            config=config,
            warm_start_from=warm_start_from,
            batch_norm=batch_norm,
        )
