"""Values on replicas, how a variable is kept there, and a model that most tests train."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from stratagem.variables.registry import VariableKind, home_of
from tests.parity.comparison import Scope, mirrored


def two() -> Any:
    """The scope of a new strategy with two replicas."""
    return mirrored(2).scope()


def dense_model(
    scope: Scope = contextlib.nullcontext,
    *layers: Any,
    optimizer: Any = "sgd",
    kind: Any = keras.Sequential,
    **compiled: Any,
) -> Any:
    """A compiled model of three features and one output, whose last kernel is ones."""
    with scope():
        last = keras.layers.Dense(1, kernel_initializer="ones")
        model = kind([keras.Input((3,)), *layers, last])
        model.compile(optimizer, "mse", **compiled)
    return model


def per_replica(strategy: Any, parts: Sequence[Any]) -> Any:
    """Gives each replica one of the parts; short ones are padded, as in a short batch."""
    return strategy.distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def kind_of(variable: Any) -> VariableKind | None:
    """How a variable is kept; None for one that was made outside every scope."""
    home = home_of(variable)
    return None if home is None else home.kind


def copies_of(variable: Any) -> list[np.ndarray]:
    """What each device holds of a variable, in the order of devices, replica axis included."""
    shards = sorted(variable.storage.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


def components_of(variable: Any) -> list[Any]:
    """The component of each replica of an ON_READ variable."""
    return np.asarray(variable.storage).tolist()


def values_of(variables: Sequence[Any]) -> list[np.ndarray]:
    """The values of variables, as seen from outside the replicas."""
    return [np.asarray(variable.value) for variable in variables]
