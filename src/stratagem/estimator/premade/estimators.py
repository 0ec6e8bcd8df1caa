"""Pre-made Estimators: baselines, linear models, deep networks, and both together."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.errors import invalid
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.inputs import HostTransforms
from stratagem.estimator.premade.columns import (
    Combiner,
    FeatureColumn,
    check_columns,
    encode_groups,
)
from stratagem.estimator.premade.feature_column import DenseFeatures, LinearModel
from stratagem.estimator.premade.heads import (
    Head,
    Reduction,
    RegressionHead,
    WeightColumn,
    class_head,
)
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.spec import (
    EstimatorSpec,
    Minimize,
    ModeKeys,
    OptimizerLike,
    minimize,
    optimizer_factory,
)

# TensorFlow's value; Keras's default, 0.99, fails on some problems.
_BATCH_NORM_MOMENTUM = 0.999

# TensorFlow's, for optimizers that are given by name.
_BASELINE_LEARNING_RATE = 0.3
_WIDE_LEARNING_RATE = 0.2
_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005

# Feature of networks without columns: one number per example.
_EXAMPLES = "examples"

ModelDir = str | os.PathLike[str] | None
Columns = Iterable[FeatureColumn]
Features = Mapping[str, Any]
Activation = str | Callable[[Any], Any] | None


# Networks, from encoded features to logits.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(abc.ABC):
    """Network that turns encoded features into logits."""

    feature_columns: tuple[FeatureColumn, ...] = ()

    @abc.abstractmethod
    def logits(self, features: Features, units: int, *, training: bool) -> tuple[Any, list[Any]]:
        """Returns logits of shape (batch, units), and the trainable variables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNetwork(Network):
    """Hidden layers over dense columns; an `activation_fn` of None means relu."""

    hidden_units: Sequence[int]
    activation_fn: Activation
    dropout: float | None
    batch_norm: bool

    def __post_init__(self) -> None:
        is_rate = self.dropout is None or 0 <= self.dropout < 1
        if not self.hidden_units or any(units < 1 for units in self.hidden_units) or not is_rate:
            given = f"hidden_units={list(self.hidden_units)} or dropout={self.dropout}"
            raise invalid(
                f"{given} is out of range.",
                "one or more positive numbers, and None or 0 <= dropout < 1.",
                "pass hidden_units=[64, 32], for example.",
            )

    def logits(self, features: Features, units: int, *, training: bool) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
        layers: list[Any] = []

        def call(layer: Any, inputs: Any, **kwargs: Any) -> Any:
            layers.append(layer)
            return layer(inputs, **kwargs)

        first = DenseFeatures(self.feature_columns, name="input_layer")
        with keras.name_scope("dnn"):
            net = call(first, features)
            for number, hidden in enumerate(self.hidden_units):
                activation: Any = self.activation_fn or "relu"
                name = f"hiddenlayer_{number}"
                net = call(keras.layers.Dense(hidden, activation, name=name), net)
                if self.dropout is not None and training:
                    net = keras.layers.Dropout(self.dropout)(net, training=True)
                if self.batch_norm:
                    norm = keras.layers.BatchNormalization(
                        momentum=_BATCH_NORM_MOMENTUM, name=f"batchnorm_{number}"
                    )
                    net = call(norm, net, training=training)
            logits = call(keras.layers.Dense(units, name="logits"), net)
        return logits, [variable for layer in layers for variable in layer.trainable_variables]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearNetwork(Network):
    """Linear model over any columns."""

    sparse_combiner: Combiner

    def logits(self, features: Features, units: int, *, training: bool) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
        layer = LinearModel(self.feature_columns, units, self.sparse_combiner, name="linear_model")
        with keras.name_scope("linear"):
            return layer(features), layer.trainable_variables


class BiasNetwork(Network):
    """Bias that ignores all features."""

    def logits(self, features: Features, units: int, *, training: bool) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
        del training
        layer = _Bias(units)
        return layer(features[_EXAMPLES]), layer.trainable_variables


class _Bias(keras.layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__(name="baseline")
        self._units = units

    def build(self, input_shape: object) -> None:
        del input_shape
        self.bias = self.add_weight(shape=(self._units,), initializer="zeros", name="bias")

    def call(self, examples: object) -> Any:
        return keras.ops.ones_like(keras.ops.expand_dims(examples, 1)) * self.bias


# A network, and the function that creates its optimizer.
_Part = tuple[Network, Callable[[], Any]]


def _linear_part(
    feature_columns: Columns,
    optimizer: OptimizerLike,
    learning_rate: float,
    sparse_combiner: Combiner,
) -> _Part:
    columns = tuple(check_columns(feature_columns))
    network = LinearNetwork(feature_columns=columns, sparse_combiner=sparse_combiner)
    return network, optimizer_factory(optimizer, learning_rate)


def _deep_part(
    feature_columns: Columns,
    optimizer: OptimizerLike,
    learning_rate: float | None,
    hidden_units: Sequence[int],
    activation_fn: Activation,
    dropout: float | None,
    batch_norm: bool,
) -> _Part:
    network = DeepNetwork(
        feature_columns=tuple(check_columns(feature_columns)),
        hidden_units=tuple(hidden_units),
        activation_fn=activation_fn,
        dropout=dropout,
        batch_norm=batch_norm,
    )
    return network, optimizer_factory(optimizer, learning_rate)


def _combined_parts(
    linear_columns: Columns | None,
    linear_optimizer: OptimizerLike,
    sparse_combiner: Combiner,
    dnn_columns: Columns | None,
    dnn_optimizer: OptimizerLike,
    hidden_units: Sequence[int] | None,
    *layers: Any,
) -> list[_Part]:
    wide, deep = list(linear_columns or ()), list(dnn_columns or ())
    if not (wide or deep) or (deep and not hidden_units):
        raise invalid(
            f"There are {len(wide)} linear_feature_columns and {len(deep)} dnn_feature_columns, "
            f"with dnn_hidden_units={hidden_units}.",
            "columns of at least one part, and hidden units for a deep one.",
            "pass dnn_hidden_units=[64, 32], for example.",
        )
    parts: list[_Part] = []
    if deep and hidden_units:
        parts.append(_deep_part(deep, dnn_optimizer, _DNN_LEARNING_RATE, hidden_units, *layers))
    if wide:
        rate = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(len(wide)))
        parts.append(_linear_part(wide, linear_optimizer, rate, sparse_combiner))
    return parts


class PremadeEstimator(Estimator):
    """Estimator whose batches are encoded by feature columns on the host.

    The networks' logits are added. Each network comes with a function that creates its optimizer.
    Without columns, the networks get only one number per example, named "examples".
    """

    def __init__(
        self,
        head: Head,
        networks: Sequence[_Part],
        model_dir: ModelDir,
        config: RunConfig | None,
        warm_start_from: object,
    ) -> None:
        def model_fn(features: Features, labels: object, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            units = head.logits_dimension
            outputs = [one.logits(features, units, training=training) for one, _ in networks]

            def train_op(loss: object) -> list[Minimize]:
                return [
                    minimize(new_optimizer(), loss, variables)
                    for (_, new_optimizer), (_, variables) in zip(networks, outputs, strict=True)
                ]

            logits = functools.reduce(operator.add, [logits for logits, _ in outputs])
            return head.create_estimator_spec(
                features, mode, logits, labels, train_op_fn=train_op if training else None
            )

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        column_groups = [one.feature_columns for one, _ in networks if one.feature_columns]
        weights = () if head.weight_column is None else ((head.weight_column,),)

        def encode(batch: object, mode: str) -> Any:
            has_labels = isinstance(batch, tuple | list)
            features, labels = batch if has_labels else (batch, None)
            if mode == ModeKeys.PREDICT:
                return encoded(features, column_groups)
            if labels is None or isinstance(labels, Mapping):
                raise invalid(
                    f"input_fn returned labels of type {type(labels).__name__}.",
                    "an array of labels in addition to the features.",
                    "return (features, labels) from input_fn.",
                )
            return encoded(features, [*column_groups, *weights]), head.encode_labels(labels)

        def encoded(features: Any, groups: Sequence[tuple[FeatureColumn, ...]]) -> dict[str, Any]:
            values = encode_groups(features, groups)
            if column_groups:
                return values
            num_examples = len(next(iter(features.values())))
            return {**values, _EXAMPLES: np.arange(num_examples, dtype="float32")}

        self._host_transforms = HostTransforms(encode=encode, decode=head.decode)


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
        model_dir: ModelDir = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
    ) -> None:
        networks = [(BiasNetwork(), optimizer_factory(optimizer, _BASELINE_LEARNING_RATE))]
        super().__init__(head, networks, model_dir, config, None)


class BaselineClassifier(BaselineEstimator):
    """Predicts the class frequencies of the training data for every example.

    All other arguments are those of `BaselineEstimator`.

    Args:
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


class BaselineRegressor(BaselineEstimator):
    """Predicts the mean of the labels for every example.

    All other arguments are those of `BaselineEstimator`.

    Args:
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        loss_reduction: Reduction = "sum_over_batch_size",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        super().__init__(head, model_dir, optimizer, config)


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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        sparse_combiner: Combiner = "sum",
        warm_start_from: object = None,
    ) -> None:
        linear = _linear_part(feature_columns, optimizer, _WIDE_LEARNING_RATE, sparse_combiner)
        super().__init__(head, [linear], model_dir, config, warm_start_from)


class LinearClassifier(PremadeEstimator):
    """Linear classifier.

    All other arguments are those of `LinearEstimator`.

    Args:
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        sparse_combiner: Combiner = "sum",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        linear = _linear_part(feature_columns, optimizer, _WIDE_LEARNING_RATE, sparse_combiner)
        super().__init__(head, [linear], model_dir, config, warm_start_from)


class LinearRegressor(PremadeEstimator):
    """Linear regressor.

    All other arguments are those of `LinearEstimator`.

    Args:
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike = "Ftrl",
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        sparse_combiner: Combiner = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        linear = _linear_part(feature_columns, optimizer, _WIDE_LEARNING_RATE, sparse_combiner)
        super().__init__(head, [linear], model_dir, config, warm_start_from)


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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        batch_norm: bool = False,
    ) -> None:
        layers = hidden_units, activation_fn, dropout, batch_norm
        deep = _deep_part(feature_columns, optimizer, None, *layers)
        super().__init__(head, [deep], model_dir, config, warm_start_from)


class DNNClassifier(PremadeEstimator):
    """Deep network classifier.

    All other arguments are those of `DNNEstimator`.

    Labels are class ids, or strings of `label_vocabulary`. `input_fn` returns strings unchanged;
    they are converted to ids on the host.

    Args:
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        optimizer: as for `DNNEstimator`; Adagrad's default learning rate in Keras is 0.001.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        layers = hidden_units, activation_fn, dropout, batch_norm
        deep = _deep_part(feature_columns, optimizer, None, *layers)
        super().__init__(head, [deep], model_dir, config, warm_start_from)


class DNNRegressor(PremadeEstimator):
    """Deep network regressor.

    All other arguments are those of `DNNEstimator`.

    Args:
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        optimizer: as for `DNNEstimator`; Adagrad's default learning rate in Keras is 0.001.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        feature_columns: Columns,
        model_dir: ModelDir = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        optimizer: OptimizerLike = "Adagrad",
        activation_fn: Activation = "relu",
        dropout: float | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        batch_norm: bool = False,
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        layers = hidden_units, activation_fn, dropout, batch_norm
        deep = _deep_part(feature_columns, optimizer, None, *layers)
        super().__init__(head, [deep], model_dir, config, warm_start_from)


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
        model_dir: ModelDir = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        config: RunConfig | None = None,
        batch_norm: bool = False,
        linear_sparse_combiner: Combiner = "sum",
        warm_start_from: object = None,
    ) -> None:
        linear = linear_feature_columns, linear_optimizer, linear_sparse_combiner
        layers = dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm
        parts = _combined_parts(*linear, dnn_feature_columns, dnn_optimizer, *layers)
        super().__init__(head, parts, model_dir, config, warm_start_from)


class DNNLinearCombinedClassifier(PremadeEstimator):
    """Wide-and-deep classifier: a linear model plus a deep network.

    All other arguments are those of `DNNLinearCombinedEstimator`.

    Args:
        n_classes: the number of classes.
        weight_column: the name of a feature of example weights, or a numeric column.
        label_vocabulary: one string per class, if labels are strings.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        model_dir: ModelDir = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        n_classes: int = 2,
        weight_column: WeightColumn = None,
        label_vocabulary: Sequence[str] | None = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: Combiner = "sum",
    ) -> None:
        head = class_head(n_classes, weight_column, label_vocabulary, loss_reduction)
        linear = linear_feature_columns, linear_optimizer, linear_sparse_combiner
        layers = dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm
        parts = _combined_parts(*linear, dnn_feature_columns, dnn_optimizer, *layers)
        super().__init__(head, parts, model_dir, config, warm_start_from)


class DNNLinearCombinedRegressor(PremadeEstimator):
    """Wide-and-deep regressor: a linear model plus a deep network.

    All other arguments are those of `DNNLinearCombinedEstimator`.

    Args:
        label_dimension: the number of values per label.
        weight_column: the name of a feature of example weights, or a numeric column.
        loss_reduction: "sum_over_batch_size" or "sum".

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
        model_dir: ModelDir = None,
        linear_feature_columns: Columns | None = None,
        linear_optimizer: OptimizerLike = "Ftrl",
        dnn_feature_columns: Columns | None = None,
        dnn_optimizer: OptimizerLike = "Adagrad",
        dnn_hidden_units: Sequence[int] | None = None,
        dnn_activation_fn: Activation = "relu",
        dnn_dropout: float | None = None,
        label_dimension: int = 1,
        weight_column: WeightColumn = None,
        config: RunConfig | None = None,
        warm_start_from: object = None,
        loss_reduction: Reduction = "sum_over_batch_size",
        batch_norm: bool = False,
        linear_sparse_combiner: Combiner = "sum",
    ) -> None:
        head = RegressionHead(label_dimension, weight_column, loss_reduction)
        linear = linear_feature_columns, linear_optimizer, linear_sparse_combiner
        layers = dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm
        parts = _combined_parts(*linear, dnn_feature_columns, dnn_optimizer, *layers)
        super().__init__(head, parts, model_dir, config, warm_start_from)
