"""What a callback cannot ask Keras: which data the running `fit` reads, and who else is called.

`fit` of Keras's JAX trainer, `JAXEpochIterator.__init__` and `CallbackList.__init__` are replaced
(Keras 3.12 to 3.15).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import keras

from stratagem.keras.private import JAXEpochIterator, JAXTrainer, calls_in_thread
from stratagem.tracebacks import filters_traceback

__all__ = ["awaits_each_step", "epoch_iterator", "install", "looks_at_batches"]


class _Fit:
    """A `fit` that runs."""

    iterator: Any = None
    awaits_steps: bool = False


class _Running(threading.local):
    def __init__(self) -> None:
        self.fits: list[_Fit] = []  # the innermost last
        self.latest: Callable[[], Any] = lambda: None


_running = _Running()


def epoch_iterator() -> Any:
    """Returns Keras's iterator over the batches that the innermost `fit` of this thread uses.

    It is the first that `fit` makes. In the call that has loaded this package, by naming something
    of it among its arguments, it is the last that was made.
    """
    return _running.fits[-1].iterator if _running.fits else _running.latest()


def awaits_each_step() -> bool:
    """Tells whether each step's result is waited for before the next one is asked for.

    So it is where a callback looks at the logs of batches, or keeps the state, and where a step is
    called by itself.
    """
    return _running.fits[-1].awaits_steps if _running.fits else True


def install() -> None:
    """Follows every `fit`, and calls callbacks that have `runs_last` last. Done once, on import."""
    _follow_fit()
    _notice_iterators()
    _order_callbacks()


def _follow_fit() -> None:
    original = JAXTrainer.fit

    @functools.wraps(original)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _begun():
            return original(self, *args, **kwargs)

    JAXTrainer.fit = filters_traceback(fit)


@contextlib.contextmanager
def _begun() -> Generator[None]:
    _running.fits.append(_Fit())
    try:
        yield
    finally:
        iterator = _running.fits.pop().iterator
        position = getattr(getattr(iterator, "data_adapter", None), "position", None)
        if position is not None:  # who follows the data does not keep it
            position.release()


def _notice_iterators() -> None:
    original = JAXEpochIterator.__init__

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _running.latest = weakref.ref(self)
        if _running.fits and _running.fits[-1].iterator is None:
            _running.fits[-1].iterator = self

    JAXEpochIterator.__init__ = made


def _order_callbacks() -> None:
    """A callback that runs last gets to know the list, too, as `callback_list`."""
    base: Any = keras.callbacks.CallbackList
    original = base.__init__

    @functools.wraps(original)
    def made(self: Any, callbacks: Any = None, *args: Any, **kwargs: Any) -> None:
        # One alone Keras would call in another thread, while the next step takes its memory.
        alone = isinstance(callbacks, keras.callbacks.Callback)
        original(self, [callbacks] if alone else callbacks, *args, **kwargs)
        self.callbacks.sort(key=_runs_last)
        for callback in filter(_runs_last, self.callbacks):
            callback.callback_list = self
        if _running.fits:
            _running.fits[-1].awaits_steps = not calls_in_thread(self) and any(
                map(_awaits_steps, self.callbacks)
            )

    base.__init__ = made


def _runs_last(callback: Any) -> bool:
    return getattr(callback, "runs_last", False)


def _awaits_steps(callback: Any) -> bool:
    return getattr(callback, "awaits_steps", False) or looks_at_batches(callback)


def looks_at_batches(callback: Any) -> bool:
    """Tells whether a callback takes the logs of single batches.

    Args:
        callback: of Keras; one of ours that needs none of them says so by `needs_batch_logs`.
    """
    if not getattr(callback, "needs_batch_logs", True):
        return False
    base = keras.callbacks.Callback
    hooks = ("on_batch_end", "on_train_batch_end", "on_test_batch_end")
    # Looked up on the object: LambdaCallback sets its hooks there.
    methods = [(getattr(callback, hook), getattr(base, hook)) for hook in hooks]
    return any(getattr(method, "__func__", None) is not default for method, default in methods)
