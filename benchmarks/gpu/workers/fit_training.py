"""Training by `fit`: of ours and of Keras's own, on the same model and data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from benchmarks.gpu.models import GpuModel
from benchmarks.gpu.options import SideOptions
from benchmarks.gpu.workers.measurement import Training

__all__ = ["training_by_fit"]


def training_by_fit(
    network: keras.Model,
    arrays: tuple[Any, Any],
    model: GpuModel,
    options: SideOptions,
    **figures: Any,
) -> Training:
    """Returns the training of a compiled model by `fit`.

    Args:
        network: the compiled model.
        arrays: inputs and labels of an epoch, wherever they are.
        model: what it is.
        options: of the side.
        **figures: other arguments of `Training`.
    """
    x, y = arrays
    first = model.batch_size * options.steps_per_call

    def fit(x: Any, y: Any, num_epochs: int) -> float:
        history = network.fit(
            x, y, batch_size=model.batch_size, epochs=num_epochs, verbose=0, shuffle=False
        )
        return float(history.history["loss"][-1])

    def rows(value: Any) -> Any:
        return keras.tree.map_structure(lambda one: one[:first], value)

    whole = list(x) if isinstance(x, tuple) else x
    train: Callable[[int], float] = lambda num_epochs: fit(whole, y, num_epochs)  # noqa: E731
    return Training(
        first_call=lambda: fit(rows(whole), y[:first], 1),
        train=train,
        num_parameters=sum(int(np.prod(one.shape)) for one in network.trainable_variables),
        **figures,
    )
