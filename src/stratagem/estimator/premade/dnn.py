"""Pre-made estimators of deep networks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads import Head, RegressionHead, binary_or_multi_class_head
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.premade.networks import DeepNetwork
from stratagem.estimator.premade.optimizers import OptimizerLike, optimizer_maker
from stratagem.estimator.premade.premade_estimator import PremadeEstimator, columns_of
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec

__all__ = ["DNNClassifier", "DNNEstimator", "DNNRegressor"]


class DNNEstimator(PremadeEstimator):
    """A deep network with a head of one's choice.

    Args:
        head: what is made of logits.
        hidden_units: units of each hidden layer.
        feature_columns: dense columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        optimizer: "Adagrad", "Adam", "Ftrl", "RMSProp" or "SGD" with Keras's learning rate; or a
            Keras optimizer; or a function that makes one, called in the model function.
        activation_fn: of hidden layers.
        dropout: which part of the outputs of a hidden layer is dropped in training.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        batch_norm: whether outputs of hidden layers are normalized.

    Raises:
        ValueError: columns, units or a dropout that cannot be; an unknown optimizer.

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
        warm_start_from: Any = None,
        batch_norm: bool = False,
    ) -> None:
        network = DeepNetwork(
            feature_columns=columns_of(feature_columns),
            hidden_units=tuple(hidden_units),
            activation_fn=activation_fn,
            dropout=dropout,
            batch_norm=batch_norm,
        )
        new_optimizer = optimizer_maker(optimizer)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            logits, variables = network.logits(features, head.logits_dimension, training=training)
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


class DNNClassifier(DNNEstimator):
    """A deep network that tells classes apart.

    Labels are ids of classes, or strings of `label_vocabulary`. Strings of features and labels
    become ids on the host; `input_fn` gives them as they are.

    Args:
        hidden_units: units of each hidden layer.
        feature_columns: dense columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        n_classes: number of classes.
        weight_column: name of the feature that weighs examples, or a numeric column.
        label_vocabulary: one string a class, where labels are strings.
        optimizer: as of `DNNEstimator`; by default Adagrad with Keras's learning rate, 0.001.
        activation_fn: of hidden layers.
        dropout: which part of the outputs of a hidden layer is dropped in training.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: whether outputs of hidden layers are normalized.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
    """A deep network that predicts numbers.

    Args:
        hidden_units: units of each hidden layer.
        feature_columns: dense columns.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        label_dimension: numbers that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        optimizer: as of `DNNEstimator`; by default Adagrad with Keras's learning rate, 0.001.
        activation_fn: of hidden layers.
        dropout: which part of the outputs of a hidden layer is dropped in training.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: whether outputs of hidden layers are normalized.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
