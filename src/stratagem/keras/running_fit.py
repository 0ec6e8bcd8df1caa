"""What a callback cannot ask Keras: which data the running `fit` reads, and who else is called.

`fit` of Keras's JAX trainer and `JAXEpochIterator.__init__` are replaced (Keras 3.12 to 3.15).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Generator
from typing import Any

import keras

from stratagem.keras.private import JAXEpochIterator, JAXTrainer

__all__ = ["RunningFit", "current_fit", "install"]


@dataclasses.dataclass
class RunningFit:
    """A `fit` that has begun.

    Args:
        callbacks: those that it was given, in the order in which they are called.
        iterator: over the batches of an epoch.
    """

    callbacks: list[Any]
    iterator: Any = None


class _Running(threading.local):
    def __init__(self) -> None:
        self.fits: list[RunningFit] = []


_running = _Running()


def current_fit() -> RunningFit | None:
    """Returns the innermost `fit` of this thread that has a callback that runs last."""
    return _running.fits[-1] if _running.fits else None


@contextlib.contextmanager
def _begun(fit: RunningFit) -> Generator[None]:
    _running.fits.append(fit)
    try:
        yield
    finally:
        _running.fits.pop()


def install() -> None:
    """Follows every `fit` with a callback that has `runs_last`. Done once, on import.

    Such a callback is called after all others, wherever it stands in their list.
    """
    _follow_fit()
    _notice_data()


def _follow_fit() -> None:
    original = JAXTrainer.fit
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind_partial(self, *args, **kwargs)
        callbacks = bound.arguments.get("callbacks")
        ordered = sorted(_flat(callbacks), key=_runs_last)
        if not any(map(_runs_last, ordered)):
            return original(self, *args, **kwargs)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks = ordered
        else:
            bound.arguments["callbacks"] = ordered
        with _begun(RunningFit(ordered)):
            return original(*bound.args, **bound.kwargs)

    JAXTrainer.fit = fit


def _flat(callbacks: Any) -> list[Any]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return keras.tree.flatten(callbacks) if callbacks else []


def _runs_last(callback: Any) -> bool:
    return getattr(callback, "runs_last", False)


def _notice_data() -> None:
    """The first epoch iterator that a `fit` makes is over the data to train with."""
    original = JAXEpochIterator.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        fit = current_fit()
        if fit is not None and fit.iterator is None:
            fit.iterator = self

    JAXEpochIterator.__init__ = made
