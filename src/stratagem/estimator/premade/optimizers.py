"""Optimizers of pre-made Estimators, from names, objects or functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from stratagem.messages import explain

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
