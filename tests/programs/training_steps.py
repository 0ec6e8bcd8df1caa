"""Training steps of `fit`, lowered for devices that are not there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from stratagem.execution import batch_arguments
from stratagem.input.batches import place, take_batch
from stratagem.keras.replica_steps import ReplicaSteps
from stratagem.topology import Topology
from tests.parity.comparison import mirrored


def dense_step(
    topology: Topology, widths: Sequence[int], batch_size: int, optimizer: str = "adam"
) -> tuple[Any, Any]:
    """Returns a classifier of dense layers of these widths, the input's first, and its step."""
    strategy = mirrored(topology.num_replicas)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.Input((widths[0],)),
                *(keras.layers.Dense(width, activation="relu") for width in widths[1:]),
                keras.layers.Dense(10),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
        model.optimizer.build(model.trainable_variables)
    images, labels = np.ones((batch_size, widths[0]), "float32"), np.zeros(batch_size, "int32")
    model.train_on_batch(images[:8], labels[:8])  # builds the metrics
    batch = take_batch((images, labels), strategy.num_replicas_in_sync)
    arguments = batch_arguments(place([batch], strategy.topology))
    return model, strategy.compiled.lower(ReplicaSteps(model).train, arguments, topology)
