"""The optimizers of pre-made estimators: given by name, as an object, or by a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras

from stratagem.messages import explain

__all__ = ["OptimizerLike", "optimizer_maker"]

OptimizerLike = str | keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer]

_BY_NAME: dict[str, Any] = {
    "Adagrad": keras.optimizers.Adagrad,
    "Adam": keras.optimizers.Adam,
    "Ftrl": keras.optimizers.Ftrl,
    "RMSProp": keras.optimizers.RMSprop,
    "SGD": keras.optimizers.SGD,
}


def optimizer_maker(
    given: OptimizerLike, learning_rate: float | None = None
) -> Callable[[], keras.optimizers.Optimizer]:
    """Returns a function that makes a new optimizer, as a model function does in each call.

    Args:
        given: a name, an optimizer, which is copied as it is now, or a function that makes one.
        learning_rate: for a name; None for Keras's.

    Returns:
        The function.

    Raises:
        ValueError: an unknown name, or no optimizer; of a function, when it is called.

    Source: tensorflow/estimator canned/optimizers.py, get_optimizer_instance_v2.
    """
    if isinstance(given, str) and given in _BY_NAME:
        arguments = {} if learning_rate is None else {"learning_rate": learning_rate}
        return lambda: _BY_NAME[given](**arguments)
    # An optimizer keeps variables of the strategy that it was built under, so each call has a copy.
    if isinstance(given, keras.optimizers.Optimizer):
        kind, config = type(given), _without_names(given.get_config())
        return lambda: kind.from_config(dict(config))
    if not callable(given):
        raise _no_optimizer(given)

    def made_by_function() -> keras.optimizers.Optimizer:
        made = given()
        if not isinstance(made, keras.optimizers.Optimizer):
            raise _no_optimizer(made)
        return made

    return made_by_function


def _without_names(config: dict[str, Any]) -> dict[str, Any]:
    """Leaves out names, which number objects: a checkpoint fits other objects of the same kind."""
    return {
        key: _without_names(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "name"
    }


def _no_optimizer(given: object) -> ValueError:
    return ValueError(
        explain(
            f"optimizer={given!r} was given to a pre-made estimator.",
            expected=f"one of {sorted(_BY_NAME)}, a Keras optimizer, or a function that makes one.",
            fix="pass keras.optimizers.Adam(0.01), for example.",
        )
    )
