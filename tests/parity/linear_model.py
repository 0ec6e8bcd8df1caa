"""Training of a linear model in NumPy: what Keras must compute, on any number of replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclass
class Momentum:
    """`keras.optimizers.SGD(0.05, momentum=0.9)` for one variable."""

    velocity: np.ndarray | float = 0.0

    def __call__(self, value: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.velocity = 0.9 * self.velocity - 0.05 * gradient
        return value + self.velocity


@dataclass
class Adam:
    """`keras.optimizers.Adam(0.05)` for one variable."""

    first: np.ndarray | float = 0.0
    second: np.ndarray | float = 0.0
    steps: int = 0

    def __call__(self, value: np.ndarray, gradient: np.ndarray) -> np.ndarray:
        self.steps += 1
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        rate = 0.05 * np.sqrt(1 - 0.999**self.steps) / (1 - 0.9**self.steps)
        return value - rate * self.first / (np.sqrt(self.second) + 1e-7)


@dataclass
class LinearModel:
    """`Dense(1)` with the squared error and an L2 penalty of 0.1 on the kernel.

    Args:
        kernel: shape (features, 1).
        bias: shape (1,).
        make_update: makes the update rule of one variable.
        updates: those of kernel and bias.
    """

    kernel: np.ndarray
    bias: np.ndarray
    make_update: Callable[[], Update]
    updates: list[Update] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.updates = [self.make_update(), self.make_update()]

    def predict(self, x: np.ndarray) -> np.ndarray:
        return x @ self.kernel + self.bias

    def measure(
        self,
        x: np.ndarray,
        y: np.ndarray,
        weights: np.ndarray,
        batch_size: int,
        *,
        is_training: bool,
    ) -> dict[str, float]:
        """Goes over the data once and returns the means over examples that Keras reports."""
        loss = absolute = 0.0
        for rows in _batches(len(x), batch_size):
            errors = self.predict(x[rows]) - y[rows]
            share = weights[rows][:, None] / len(errors)
            penalty = 0.1 * np.sum(self.kernel**2)
            loss += len(errors) * (np.sum(share * errors**2) + penalty)
            absolute += np.sum(np.abs(errors))
            if is_training:
                slope = 2 * share * errors
                kernel_gradient = x[rows].T @ slope + 0.2 * self.kernel
                self.kernel = self.updates[0](self.kernel, kernel_gradient)
                self.bias = self.updates[1](self.bias, np.sum(slope, axis=0))
        return {"loss": loss / len(x), "mae": absolute / len(x)}


def _batches(num_examples: int, batch_size: int) -> Iterator[slice]:
    for start in range(0, num_examples, batch_size):
        yield slice(start, start + batch_size)
