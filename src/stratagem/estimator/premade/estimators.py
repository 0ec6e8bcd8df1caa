"""Pre-made Estimators: baselines, linear models, deep networks, and both together."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from stratagem.errors import explain
from stratagem.estimator.feature_column.columns import FeatureColumn, NumericColumn
from stratagem.estimator.premade.class_heads import binary_or_multi_class_head
from stratagem.estimator.premade.heads import Head, RegressionHead
from stratagem.estimator.premade.premade_estimator import (
    BiasNetwork,
    DeepNetwork,
    LinearNetwork,
    Network,
    OptimizerLike,
    PremadeEstimator,
    checked_columns,
    optimizer_factory,
)
from stratagem.estimator.run_config import RunConfig

# TensorFlow's, for optimizers that are given by name.
_BASELINE_LEARNING_RATE = 0.3
_WIDE_LEARNING_RATE = 0.2
_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005


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
        networks = [(BiasNetwork(), optimizer_factory(optimizer, _BASELINE_LEARNING_RATE))]
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


# Linear model Estimators.


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
        networks = [(network, optimizer_factory(optimizer, _WIDE_LEARNING_RATE))]
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


# Deep network Estimators.


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


# Wide-and-deep Estimators: a linear model plus a deep network.


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
        if not (wide_columns or deep_columns) or (deep_columns and not dnn_hidden_units):
            raise ValueError(
                explain(
                    f"There are {len(wide_columns)} linear_feature_columns and {len(deep_columns)} "
                    f"dnn_feature_columns, with dnn_hidden_units={dnn_hidden_units}.",
                    expected="columns of at least one part, and hidden units for a deep one.",
                    fix="pass dnn_hidden_units=[64, 32], for example.",
                )
            )
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
