"""Pre-made estimators of a linear model and a deep network together: wide and deep."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.numeric import NumericColumn
from stratagem.estimator.heads import Head, RegressionHead, binary_or_multi_class_head
from stratagem.estimator.mode_keys import ModeKeys
from stratagem.estimator.premade.networks import DeepNetwork, LinearNetwork
from stratagem.estimator.premade.optimizers import OptimizerLike, optimizer_maker
from stratagem.estimator.premade.premade_estimator import PremadeEstimator, columns_of
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.estimator.train_op import Minimize, minimize
from stratagem.messages import explain

__all__ = [
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
]

_DNN_LEARNING_RATE = 0.001
_LINEAR_LEARNING_RATE = 0.005


class DNNLinearCombinedEstimator(PremadeEstimator):
    """A linear model and a deep network whose logits are added, with a head of one's choice.

    Each part has an optimizer of its own; both make the same loss smaller.

    Args:
        head: what is made of logits.
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        linear_feature_columns: columns of the linear part; None for no such part.
        linear_optimizer: a name, with a learning rate of 0.005, or of 1/sqrt(columns) where that
            is smaller; or a Keras optimizer; or a function that makes one.
        dnn_feature_columns: dense columns of the deep part; None for no such part.
        dnn_optimizer: likewise; a name has a learning rate of 0.001.
        dnn_hidden_units: units of each hidden layer.
        dnn_activation_fn: of hidden layers.
        dnn_dropout: which part of the outputs of a hidden layer is dropped in training.
        config: a `RunConfig`, with the strategies.
        batch_norm: whether outputs of hidden layers are normalized.
        linear_sparse_combiner: what is made of the weights of several ids.
        warm_start_from: as of `Estimator`.

    Raises:
        ValueError: no columns at all, columns of a deep part without hidden units, or another
            argument that cannot be.

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
        warm_start_from: Any = None,
    ) -> None:
        wide_columns = columns_of(linear_feature_columns or None)
        deep_columns = columns_of(dnn_feature_columns or None)
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
        new_linear_optimizer = optimizer_maker(linear_optimizer, rate)
        new_dnn_optimizer = optimizer_maker(dnn_optimizer, _DNN_LEARNING_RATE)

        def model_fn(features: Any, labels: Any, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            units = head.logits_dimension
            parts: list[tuple[Any, list[Any], Callable[[], Any]]] = []
            if deep_columns:
                made = deep.logits(features, units, training=training)
                parts.append((*made, new_dnn_optimizer))
            if wide_columns:
                parts.append((*wide.logits(features, units), new_linear_optimizer))

            def train_op(loss: Any) -> list[Minimize]:
                return [
                    minimize(new_optimizer(), loss, variables)
                    for _, variables, new_optimizer in parts
                ]

            return head.create_estimator_spec(
                features,
                mode,
                sum(part[0] for part in parts),
                labels,
                train_op_fn=train_op if training else None,
            )

        groups = [columns for columns in (wide_columns, deep_columns) if columns]
        super().__init__(model_fn, head, groups, model_dir, config, warm_start_from)


def _check_parts(wide: Any, deep: Any, hidden_units: Any) -> None:
    if not wide and not deep:
        raise ValueError(
            explain(
                "Neither linear_feature_columns nor dnn_feature_columns were given.",
                expected="columns for one of the parts, or for both.",
                fix="pass one of them.",
            )
        )
    if deep and not hidden_units:
        raise ValueError(
            explain(
                f"dnn_feature_columns were given with dnn_hidden_units={hidden_units}.",
                expected="units of each hidden layer.",
                fix="pass dnn_hidden_units=[64, 32], for example.",
            )
        )


class DNNLinearCombinedClassifier(DNNLinearCombinedEstimator):
    """A linear model and a deep network that tell classes apart together.

    Args:
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        linear_feature_columns: columns of the linear part.
        linear_optimizer: as of `DNNLinearCombinedEstimator`.
        dnn_feature_columns: dense columns of the deep part.
        dnn_optimizer: as of `DNNLinearCombinedEstimator`.
        dnn_hidden_units: units of each hidden layer.
        dnn_activation_fn: of hidden layers.
        dnn_dropout: which part of the outputs of a hidden layer is dropped in training.
        n_classes: number of classes.
        weight_column: name of the feature that weighs examples, or a numeric column.
        label_vocabulary: one string a class, where labels are strings.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: whether outputs of hidden layers are normalized.
        linear_sparse_combiner: what is made of the weights of several ids.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
    """A linear model and a deep network that predict numbers together.

    Args:
        model_dir: folder of checkpoints; None for that of the config, or a new one.
        linear_feature_columns: columns of the linear part.
        linear_optimizer: as of `DNNLinearCombinedEstimator`.
        dnn_feature_columns: dense columns of the deep part.
        dnn_optimizer: as of `DNNLinearCombinedEstimator`.
        dnn_hidden_units: units of each hidden layer.
        dnn_activation_fn: of hidden layers.
        dnn_dropout: which part of the outputs of a hidden layer is dropped in training.
        label_dimension: numbers that a label has.
        weight_column: name of the feature that weighs examples, or a numeric column.
        config: a `RunConfig`, with the strategies.
        warm_start_from: as of `Estimator`.
        loss_reduction: "sum_over_batch_size" or "sum".
        batch_norm: whether outputs of hidden layers are normalized.
        linear_sparse_combiner: what is made of the weights of several ids.

    Raises:
        ValueError: an argument that cannot be.

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
        warm_start_from: Any = None,
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
