"""Pre-made Estimators: baselines, linear models, deep networks, and both together."""

from __future__ import annotations

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
from stratagem.keras.variables.creation import Variable

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


# Parts of a model: a network from encoded features to logits, and its own optimizer.


@dataclasses.dataclass(frozen=True)
class Part:
    """A network with its columns, and a function that creates its optimizer.

    `network` creates the layers. It is called with features, the number of logits, and whether it
    trains; it returns logits of shape (batch, number) and the trainable variables.
    """

    columns: tuple[FeatureColumn, ...]
    network: Callable[[Features, int, bool], tuple[Any, list[Any]]]
    new_optimizer: Callable[[], keras.optimizers.Optimizer]


def _deep_part(
    feature_columns: Columns,
    optimizer: OptimizerLike,
    learning_rate: float | None,
    hidden_units: Sequence[int],
    activation_fn: Activation,
    dropout: float | None,
    batch_norm: bool,
) -> Part:
    """Returns hidden layers over dense columns; an `activation_fn` of None means relu."""
    columns, sizes = tuple(check_columns(feature_columns)), tuple(hidden_units)
    if dropout is not None and not 0 <= dropout < 1:  # Keras accepts 1, which leaves nothing
        raise invalid(
            f"dropout={dropout} is not a fraction of hidden outputs to drop.",
            "None, or a number of at least 0 and below 1.",
            "pass 0.1 to drop a tenth and keep the rest.",
        )
    activation: Any = activation_fn or "relu"

    def network(features: Features, units: int, training: bool) -> tuple[Any, list[Any]]:
        layers: list[Any] = [DenseFeatures(columns, name="input_layer")]
        with keras.name_scope("dnn"):
            net = layers[0](features)
            for number, hidden in enumerate(sizes):
                name = f"hiddenlayer_{number}"
                layers.append(keras.layers.Dense(hidden, activation, name=name))
                net = layers[-1](net)
                if dropout is not None and training:
                    net = keras.layers.Dropout(dropout)(net, training=True)
                if batch_norm:
                    name = f"batchnorm_{number}"
                    norm = keras.layers.BatchNormalization(momentum=_BATCH_NORM_MOMENTUM, name=name)
                    layers.append(norm)
                    net = norm(net, training=training)
            layers.append(keras.layers.Dense(units, name="logits"))
            logits = layers[-1](net)
        return logits, [variable for layer in layers for variable in layer.trainable_variables]

    return Part(columns, network, optimizer_factory(optimizer, learning_rate))


def _linear_part(
    feature_columns: Columns,
    optimizer: OptimizerLike,
    learning_rate: float,
    sparse_combiner: Combiner,
) -> Part:
    columns = tuple(check_columns(feature_columns))

    def network(features: Features, units: int, training: bool) -> tuple[Any, list[Any]]:
        layer = LinearModel(columns, units, sparse_combiner, name="linear_model")
        with keras.name_scope("linear"):
            return layer(features), layer.trainable_variables

    return Part(columns, network, optimizer_factory(optimizer, learning_rate))


def _bias_part(optimizer: OptimizerLike) -> Part:
    """Returns a bias that ignores all features."""

    def network(features: Features, units: int, training: bool) -> tuple[Any, list[Any]]:
        with keras.name_scope("baseline"):
            bias: Any = Variable(np.zeros(units, "float32"), name="bias")
        ones: Any = keras.ops.ones_like(features[_EXAMPLES])
        return ones[:, None] * bias, [bias]

    return Part((), network, optimizer_factory(optimizer, _BASELINE_LEARNING_RATE))


class PremadeEstimator(Estimator):
    """Estimator whose batches are encoded by feature columns on the host.

    The networks' logits are added. Without columns, the networks get only one number per example,
    named "examples".
    """

    def __init__(
        self,
        head: Head,
        parts: Sequence[Part],
        model_dir: ModelDir,
        config: RunConfig | None,
        warm_start_from: object,
    ) -> None:
        def model_fn(features: Features, labels: object, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            units = head.logits_dimension
            outputs = [part.network(features, units, training) for part in parts]

            def train_op(loss: object) -> list[Minimize]:
                return [
                    minimize(part.new_optimizer(), loss, variables)
                    for part, (_, variables) in zip(parts, outputs, strict=True)
                ]

            logits = functools.reduce(operator.add, [logits for logits, _ in outputs])
            return head.create_estimator_spec(
                features, mode, logits, labels, train_op_fn=train_op if training else None
            )

        super().__init__(model_fn, model_dir, config, warm_start_from=warm_start_from)
        column_groups = [part.columns for part in parts if part.columns]
        weights = () if head.weight_column is None else ((head.weight_column,),)

        def encode(batch: Any, mode: str) -> Any:
            features, labels = batch if isinstance(batch, tuple | list) else (batch, None)
            predicts = mode == ModeKeys.PREDICT
            values = encode_groups(features, [*column_groups, *(() if predicts else weights)])
            if not column_groups:
                num_examples = len(next(iter(features.values())))
                values[_EXAMPLES] = np.arange(num_examples, dtype="float32")
            if predicts:
                return values
            if labels is None or isinstance(labels, Mapping):
                raise ValueError(
                    f"input_fn returned labels of type {type(labels).__name__}: return (features, "
                    "labels), with an array of labels."
                )
            return values, head.encode_labels(labels)

        self._encode, self._decode = encode, head.decode


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
        super().__init__(head, [_bias_part(optimizer)], model_dir, config, None)


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


class LinearClassifier(LinearEstimator):
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
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from
        )


class LinearRegressor(LinearEstimator):
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
        super().__init__(
            head, feature_columns, model_dir, optimizer, config, sparse_combiner, warm_start_from
        )


class DNNEstimator(PremadeEstimator):
    """Deep network with a given head.

    Args:
        head: computes loss, predictions and metrics from the logits.
        hidden_units: the number of units of each hidden layer; without any, the model is linear.
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
        ValueError: if columns, dropout or optimizer are invalid; in training, by Keras, if units
            are not positive.

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


class DNNClassifier(DNNEstimator):
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
        layers = hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout
        super().__init__(head, *layers, config, warm_start_from, batch_norm)


class DNNRegressor(DNNEstimator):
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
        layers = hidden_units, feature_columns, model_dir, optimizer, activation_fn, dropout
        super().__init__(head, *layers, config, warm_start_from, batch_norm)


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
        wide, deep = list(linear_feature_columns or ()), list(dnn_feature_columns or ())
        if not (wide or deep) or (deep and not dnn_hidden_units):
            raise ValueError(
                f"There are {len(wide)} linear_feature_columns and {len(deep)} "
                f"dnn_feature_columns with {dnn_hidden_units=}: pass columns, and units if deep."
            )
        parts: list[Part] = []
        if deep and dnn_hidden_units:
            layers = dnn_hidden_units, dnn_activation_fn, dnn_dropout, batch_norm
            parts.append(_deep_part(deep, dnn_optimizer, _DNN_LEARNING_RATE, *layers))
        if wide:
            rate = min(_LINEAR_LEARNING_RATE, 1 / math.sqrt(len(wide)))
            parts.append(_linear_part(wide, linear_optimizer, rate, linear_sparse_combiner))
        super().__init__(head, parts, model_dir, config, warm_start_from)


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
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
        linear = model_dir, linear_feature_columns, linear_optimizer
        layers = dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn
        rest = dnn_dropout, config, batch_norm, linear_sparse_combiner, warm_start_from
        super().__init__(head, *linear, *layers, *rest)


class DNNLinearCombinedRegressor(DNNLinearCombinedEstimator):
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
        linear = model_dir, linear_feature_columns, linear_optimizer
        layers = dnn_feature_columns, dnn_optimizer, dnn_hidden_units, dnn_activation_fn
        rest = dnn_dropout, config, batch_norm, linear_sparse_combiner, warm_start_from
        super().__init__(head, *linear, *layers, *rest)
