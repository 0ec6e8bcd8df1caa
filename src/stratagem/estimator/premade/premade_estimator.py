"""PremadeEstimator: base of Estimators with feature columns, a network and a head."""

from __future__ import annotations

import abc
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from stratagem.errors import explain
from stratagem.estimator.estimator import Estimator
from stratagem.estimator.feature_column.columns import FeatureColumn, check_columns, encode_groups
from stratagem.estimator.feature_column.layers import DenseFeatures, LinearModel
from stratagem.estimator.inputs import HostTransforms
from stratagem.estimator.premade.heads import Head
from stratagem.estimator.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec, Minimize, ModeKeys, minimize

# Networks of pre-made Estimators, from encoded features to logits.

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


class PremadeEstimator(Estimator):
    """Estimator whose batches are encoded by feature columns on the host.

    The networks' logits are added. Each network comes with a function that creates its optimizer.
    Without columns, the networks get only one number per example, named `EXAMPLES`.
    """

    def __init__(
        self,
        head: Head,
        networks: Sequence[tuple[Network, Callable[[], Any]]],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: object,
    ) -> None:
        def model_fn(features: Mapping[str, Any], labels: object, mode: str) -> EstimatorSpec:
            training = mode == ModeKeys.TRAIN
            units = head.logits_dimension
            outputs = [
                network.logits(features, units, training=training) for network, _ in networks
            ]

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
        columns = [network.feature_columns for network, _ in networks]
        column_groups = [group for group in columns if group]
        weights = () if head.weight_column is None else ((head.weight_column,),)

        def encode(batch: object, mode: str) -> Any:
            has_labels = isinstance(batch, tuple | list)
            features, labels = batch if has_labels else (batch, None)
            if mode == ModeKeys.PREDICT:
                return encoded(features, column_groups)
            _check_labels(labels)
            return encoded(features, [*column_groups, *weights]), head.encode_labels(labels)

        def encoded(features: Any, groups: Sequence[tuple[FeatureColumn, ...]]) -> dict[str, Any]:
            values = encode_groups(features, groups)
            return values if column_groups else {**values, EXAMPLES: _numbered(features)}

        self._host_transforms = HostTransforms(encode=encode, decode=head.decode)


def _numbered(features: Mapping[str, Any]) -> np.ndarray:
    """Returns one number per example of a batch."""
    return np.arange(len(next(iter(features.values()))), dtype="float32")


def checked_columns(feature_columns: Iterable[FeatureColumn] | None) -> tuple[FeatureColumn, ...]:
    """Returns the columns of a network; none for None."""
    columns = None if feature_columns is None else tuple(feature_columns)
    return () if columns is None else tuple(check_columns(columns))


def _check_labels(labels: object) -> None:
    if labels is None or isinstance(labels, Mapping):
        raise ValueError(
            explain(
                f"input_fn returned labels of type {type(labels).__name__}.",
                expected="an array of labels in addition to the features.",
                fix="return (features, labels) from input_fn.",
            )
        )


# Optimizers of pre-made Estimators, from names, objects or functions.

OptimizerLike = str | keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer]

_BY_NAME: dict[str, Any] = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}


def optimizer_factory(
    optimizer: OptimizerLike, learning_rate: float | None = None
) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that creates a new optimizer; `learning_rate` applies to names only."""
    if isinstance(optimizer, str) and optimizer in _BY_NAME:
        arguments = {} if learning_rate is None else {"learning_rate": learning_rate}
        return lambda: _BY_NAME[optimizer](**arguments)
    # An optimizer's variables belong to one strategy, so each call gets a copy.
    if isinstance(optimizer, keras.optimizers.Optimizer):
        kind, config = type(optimizer), _without_names(optimizer.get_config())
        return lambda: kind.from_config(dict(config))
    if not callable(optimizer):
        raise _wrong_optimizer(optimizer)

    def call_factory() -> keras.optimizers.Optimizer:
        created = optimizer()
        if not isinstance(created, keras.optimizers.Optimizer):
            raise _wrong_optimizer(created)
        return created

    return call_factory


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    """Removes names, which number objects, so that checkpoints fit copies of an optimizer."""
    return {
        key: _without_names(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }


def _wrong_optimizer(optimizer: object) -> ValueError:
    return ValueError(
        explain(
            f"optimizer={optimizer!r} is not an optimizer.",
            expected=f"one of {sorted(_BY_NAME)}, a Keras optimizer, or a function that makes one.",
            fix="pass keras.optimizers.Adam(0.01), for example.",
        )
    )
