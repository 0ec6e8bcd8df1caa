"""The networks of pre-made estimators: from encoded features to logits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.layers import DenseFeatures, LinearModel
from stratagem.messages import explain

__all__ = ["DeepNetwork", "LinearNetwork"]

# TensorFlow found that Keras's 0.99 fails on some problems.
_BATCH_NORM_MOMENTUM = 0.999


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNetwork:
    """Hidden layers over dense columns.

    Args:
        feature_columns: dense columns.
        hidden_units: of each hidden layer.
        activation_fn: of the hidden layers; None for relu.
        dropout: which part of the outputs of a hidden layer is dropped in training; None for none.
        batch_norm: whether outputs of hidden layers are normalized.

    Raises:
        ValueError: hidden units that are not positive, or a dropout outside of 0 to 1.

    Source: tensorflow/estimator canned/dnn.py, _DNNModelV2.
    """

    feature_columns: tuple[FeatureColumn, ...]
    hidden_units: Sequence[int]
    activation_fn: str | Callable[[Any], Any] | None
    dropout: float | None
    batch_norm: bool

    def __post_init__(self) -> None:
        is_rate = self.dropout is None or 0 <= self.dropout < 1
        if not self.hidden_units or any(units < 1 for units in self.hidden_units) or not is_rate:
            raise ValueError(
                explain(
                    f"hidden_units={list(self.hidden_units)} and dropout={self.dropout} were "
                    "given.",
                    expected="one or more positive numbers, and None or 0 <= dropout < 1.",
                    fix="pass hidden_units=[64, 32], for example.",
                )
            )

    def logits(
        self, features: Mapping[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Makes the layers and calls them.

        Args:
            features: encoded features.
            units: numbers of the result.
            training: whether outputs are dropped and batch statistics counted.

        Returns:
            Logits of shape (batch, units), and the variables to train.
        """
        layers: list[Any] = [DenseFeatures(self.feature_columns, name="input_layer")]
        with keras.name_scope("dnn"):
            net = layers[0](features)
            for number, hidden in enumerate(self.hidden_units):
                activation: Any = self.activation_fn or "relu"
                layers.append(
                    keras.layers.Dense(hidden, activation=activation, name=f"hiddenlayer_{number}")
                )
                net = layers[-1](net)
                if self.dropout is not None and training:
                    net = keras.layers.Dropout(self.dropout)(net, training=True)
                if self.batch_norm:
                    layers.append(
                        keras.layers.BatchNormalization(
                            momentum=_BATCH_NORM_MOMENTUM, name=f"batchnorm_{number}"
                        )
                    )
                    net = layers[-1](net, training=training)
            layers.append(keras.layers.Dense(units, name="logits"))
            logits = layers[-1](net)
        return logits, [variable for layer in layers for variable in layer.trainable_variables]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearNetwork:
    """A linear model over any columns.

    Args:
        feature_columns: the columns.
        sparse_combiner: as of `LinearModel`.

    Source: tensorflow/estimator canned/linear.py, _linear_model_fn_builder_v2.
    """

    feature_columns: tuple[FeatureColumn, ...]
    sparse_combiner: Any

    def logits(self, features: Mapping[str, Any], units: int) -> tuple[Any, list[Any]]:
        """Makes the layer and calls it.

        Args:
            features: encoded features.
            units: numbers of the result.

        Returns:
            Logits of shape (batch, units), and the variables to train.
        """
        layer = LinearModel(self.feature_columns, units, self.sparse_combiner, name="linear_model")
        with keras.name_scope("linear"):
            return layer(features), layer.trainable_variables
