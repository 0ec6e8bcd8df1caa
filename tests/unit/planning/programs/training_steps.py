"""Training steps of `fit`, lowered for devices that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import keras

from stratagem.devices.mesh import Topology
from stratagem.keras.training.model import lower_training_step
from stratagem.strategies.mirrored import CompileOnlyStrategy


def dense_step(
    topology: Topology,
    widths: Sequence[int],
    batch_size: int,
    optimizer: str = "adam",
    num_steps: int = 1,
) -> tuple[Any, Any]:
    """Returns a classifier of dense layers of these widths, the input's first, and its steps."""
    with CompileOnlyStrategy(topology.devices or ()).scope():
        model = keras.Sequential(
            [
                keras.Input((widths[0],)),
                *(keras.layers.Dense(width, activation="relu") for width in widths[1:]),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    images = jax.ShapeDtypeStruct((batch_size, widths[0]), "float32")
    labels = jax.ShapeDtypeStruct((batch_size,), "int32")
    return model, lower_training_step(model, (images, labels), num_steps=num_steps)
