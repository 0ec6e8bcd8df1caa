"""Our side of the comparison: trains the problem under a strategy of two devices."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

import stratagem as sg
from tests.parity.torch.problem import (
    BATCH_SIZE,
    HIDDEN,
    LEARNING_RATE,
    MOMENTUM,
    NUM_CLASSES,
    NUM_FEATURES,
    examples,
    initial_weights,
)

__all__ = ["DEVICES", "Trained", "adam", "local", "sgd_with_momentum", "train"]

DEVICES = ["cpu:0", "cpu:1"]


@dataclasses.dataclass(frozen=True)
class Trained:
    """Loss of each step, and the weights in the end."""

    losses: np.ndarray
    weights: list[np.ndarray]

    def differences(self, recorded: Mapping[str, np.ndarray], name: str) -> tuple[float, float]:
        """Returns the largest difference of a loss, and of a weight, from those recorded."""
        wanted = recorded[f"{name}/losses"][-len(self.losses) :]
        assert wanted[-5:].mean() < wanted[:5].mean() - 0.2
        in_weights = max(
            float(np.abs(ours - recorded[f"{name}/weights {place}"]).max())
            for place, ours in enumerate(self.weights)
        )
        return float(np.abs(self.losses - wanted).max()), in_weights


def local(method: sg.local_updates.LocalUpdates) -> sg.Strategy:
    """Returns a strategy of local updates."""
    return sg.LocalUpdateStrategy(method, devices=DEVICES)


def sgd_with_momentum() -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of local SGD."""
    return keras.optimizers.SGD(LEARNING_RATE / 4, momentum=MOMENTUM)


def adam() -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of DiLoCo."""
    return keras.optimizers.AdamW(0.01, epsilon=1e-12, weight_decay=0.01)


def train(
    strategy: sg.Strategy,
    optimizer: Callable[[], Any],
    steps: slice,
    *,
    weights: Sequence[np.ndarray] | None = None,
    prepare: Callable[[Any, Any], None] = lambda model, optimizer: None,
) -> Trained:
    """Trains for some of the steps.

    Args:
        strategy: of two devices.
        optimizer: makes the optimizer.
        steps: which of the steps.
        weights: to begin with; None for the initial ones.
        prepare: called with the model and the optimizer before the first step.
    """
    with strategy.scope():
        layers = keras.layers
        model: Any = keras.Sequential(
            [
                layers.Input((NUM_FEATURES,)),
                layers.Dense(HIDDEN, "relu"),
                layers.Dense(NUM_CLASSES),
            ]
        )
        model.set_weights(initial_weights() if weights is None else weights)
        own = optimizer()
        own.build(model.trainable_variables)
    prepare(model, own)
    make_losses: Any = keras.losses.SparseCategoricalCrossentropy
    per_example = make_losses(from_logits=True, reduction=None)

    def step(batch: Any) -> Any:
        x, y = batch

        def loss_fn() -> Any:
            losses = per_example(y, model(x, training=True))
            return sg.compute_average_loss(losses, global_batch_size=BATCH_SIZE)

        loss, gradients = sg.value_and_grad(loss_fn, model.trainable_variables)
        own.apply(gradients, model.trainable_variables)
        return loss

    x, y = (one[steps].reshape(-1, *one.shape[2:]) for one in examples())
    dataset = strategy.distribute_dataset(sg.input.Dataset((x, y), batch_size=BATCH_SIZE))
    losses = strategy.run_steps(step, iter(dataset), len(x) // BATCH_SIZE, reduce="sum")
    return Trained(np.asarray(losses), model.get_weights())
