"""Measurements of training by Keras, shared by all programs. Imports no Stratagem."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras
import numpy as np

Measurements = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a program runs: as Keras runs it on one device, or under a strategy.

    Args:
        scope: returns the context in which models are made.
        strategy: for the few programs that hand it on; None for plain Keras.
    """

    scope: Callable[[], AbstractContextManager[Any]]
    strategy: Any = None

    def check(self, model: Any) -> Any:
        """Returns a model that is trained here; one that is trained elsewhere is an error."""
        strategy = getattr(model, "distribute_strategy", None)
        if self.strategy is not None and strategy is not self.strategy:
            raise AssertionError(f"{model.name} belongs to {strategy}, not to {self.strategy}")
        return model


Program = Callable[[Place], Measurements]


def run_program(program: Program, place: Place) -> dict[str, np.ndarray]:
    """Runs a program from the same seed and with the same names each time."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    return {key: np.asarray(value) for key, value in program(place).items()}


def with_large_weights(model: Any) -> Any:
    """Adds to matrices, which language models draw so small that all inputs come out alike."""
    random = np.random.default_rng(20)
    model.set_weights(
        [
            weight + random.normal(0, 0.3, weight.shape) if weight.ndim > 1 else weight
            for weight in model.get_weights()
        ]
    )
    return model


def fitted(place: Place, model: Any, *data: Any, **arguments: Any) -> dict[str, Any]:
    """Trains two epochs without shuffling; returns the history and the state after it."""
    defaults = {"epochs": 2, "shuffle": False, "verbose": 0}
    history = place.check(model).fit(*data, **defaults | arguments).history
    return {f"fit {key}": value for key, value in history.items()} | state_of(model)


def evaluated(model: Any, *data: Any, **arguments: Any) -> dict[str, Any]:
    logs = model.evaluate(*data, verbose=0, return_dict=True, **arguments)
    return {f"evaluate {key}": value for key, value in logs.items()}


def predicted(model: Any, inputs: Any, **arguments: Any) -> dict[str, Any]:
    outputs = keras.tree.flatten(model.predict(inputs, verbose=0, **arguments))
    return {f"predict {index}": value for index, value in enumerate(outputs)}


def state_of(model: Any) -> dict[str, Any]:
    """All weights of a model and its optimizer, by position and name."""
    variables = [*model.weights, *(model.optimizer.variables if model.optimizer else ())]
    return {
        f"variable {index} {variable.name}": np.asarray(variable.value)
        for index, variable in enumerate(variables)
    }


def measured(
    place: Place, model: Any, x: Any, y: Any, batch_size: int, **fit_arguments: Any
) -> dict[str, Any]:
    """Trains, evaluates and predicts; the batch size need not divide the number of examples."""
    return {
        **fitted(place, model, x, y, batch_size=batch_size, **fit_arguments),
        **evaluated(model, x, y, batch_size=batch_size),
        **predicted(model, x, batch_size=batch_size),
    }
