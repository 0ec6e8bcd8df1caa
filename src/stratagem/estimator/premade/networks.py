"""Networks of pre-made Estimators, from encoded features to logits."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from stratagem.estimator.feature_column.columns import FeatureColumn
from stratagem.estimator.feature_column.layers import DenseFeatures, LinearModel
from stratagem.messages import explain

# TensorFlow's value; Keras's default, 0.99, fails on some problems.
_BATCH_NORM_MOMENTUM = 0.999

# Feature of networks without columns: one number per example.
EXAMPLES = "examples"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Network(abc.ABC):
    """Network that turns encoded features into logits."""

    feature_columns: tuple[FeatureColumn, ...] = ()

    @abc.abstractmethod
    def logits(
        self, features: Mapping[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Returns logits of shape (batch, units), and the trainable variables."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepNetwork(Network):
    """Hidden layers over dense columns; an `activation_fn` of None means relu."""

    hidden_units: Sequence[int]
    activation_fn: str | Callable[[Any], Any] | None
    dropout: float | None
    batch_norm: bool

    def __post_init__(self) -> None:
        is_rate = self.dropout is None or 0 <= self.dropout < 1
        if not self.hidden_units or any(units < 1 for units in self.hidden_units) or not is_rate:
            raise ValueError(
                explain(
                    f"hidden_units={list(self.hidden_units)} or dropout={self.dropout} is out "
                    "of range.",
                    expected="one or more positive numbers, and None or 0 <= dropout < 1.",
                    fix="pass hidden_units=[64, 32], for example.",
                )
            )

    def logits(
        self, features: Mapping[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
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
class LinearNetwork(Network):
    """Linear model over any columns."""

    sparse_combiner: Any

    def logits(
        self, features: Mapping[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
        layer = LinearModel(self.feature_columns, units, self.sparse_combiner, name="linear_model")
        with keras.name_scope("linear"):
            return layer(features), layer.trainable_variables


class BiasNetwork(Network):
    """Bias that ignores all features."""

    def logits(
        self, features: Mapping[str, Any], units: int, *, training: bool
    ) -> tuple[Any, list[Any]]:
        """Creates the layers and calls them."""
        del training
        layer = _Bias(units)
        return layer(features[EXAMPLES]), layer.trainable_variables


class _Bias(keras.layers.Layer):
    def __init__(self, units: int) -> None:
        super().__init__(name="baseline")
        self._units = units

    def build(self, input_shape: object) -> None:
        del input_shape
        self.bias = self.add_weight(shape=(self._units,), initializer="zeros", name="bias")

    def call(self, examples: object) -> Any:
        return keras.ops.ones_like(keras.ops.expand_dims(examples, 1)) * self.bias
