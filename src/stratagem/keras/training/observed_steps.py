"""Steps of `fit` of a model without a strategy, for the observer of a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from stratagem.observe.profiling.marks import input_mark
from stratagem.observe.profiling.step_observer import current_observer


def observe_steps(model: Any) -> None:
    """Lets the observer, if any, see the steps of a model without a strategy."""
    function = model.train_function
    is_observed = isinstance(function, ObservedTrainFunction)
    if current_observer() is not None and function is not None and not is_observed:
        model.train_function = ObservedTrainFunction(model, function)


def restore_steps(model: Any) -> None:
    """Undoes `observe_steps`."""
    if isinstance(model.train_function, ObservedTrainFunction):
        model.train_function = model.train_function.original


class ObservedTrainFunction:
    """The `train_function` of a model without a strategy, with notes to the observer."""

    def __init__(self, model: Any, original: Callable[..., Any]) -> None:
        self.original = original
        self._model = model

    def __call__(self, state: object, iterator: Iterator[Any]) -> Any:
        """Runs a group of steps, as Keras's own function does."""
        observer = current_observer()
        if observer is None:
            return self.original(state, iterator)
        results: list[Any] = []
        with observer.step(self._model.steps_per_execution, lambda: results[0][0]):
            results.append(self.original(state, _MarkedIterator(iterator)))
        return results[0]


class _MarkedIterator:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with input_mark():
            return next(self._iterator)
