"""The active `fit` call: its batch iterator and the order of its callbacks.

Keras does not expose these to callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any

import keras

from stratagem.keras.private.trainers import calls_in_thread
from stratagem.keras.training.fit_progress import FitProgress
from stratagem.observe.run_events.process_writer import current_events
from stratagem.tracebacks import filters_traceback

if TYPE_CHECKING:
    from stratagem.keras.private import JAXEpochIterator


class _Fit:
    """An active call of `fit`."""

    iterator: Any = None
    awaits_steps: bool = False
    progress: FitProgress | None = None

    def __init__(self) -> None:
        self.exits = contextlib.ExitStack()


class _Running(threading.local):
    def __init__(self) -> None:
        self.fits: list[_Fit] = []  # innermost last
        self.latest: Callable[[], Any] = lambda: None


_running = _Running()


def epoch_iterator() -> Any:
    """Returns Keras's batch iterator of the innermost `fit` of this thread: the first it creates.

    If the arguments of that `fit` call imported this package, returns the latest iterator instead.
    """
    return _running.fits[-1].iterator if _running.fits else _running.latest()


def awaits_each_step() -> bool:
    """Returns True if each step's result is awaited before the next step starts.

    True if a callback reads batch logs or stores the state, and for steps outside `fit`.
    """
    return _running.fits[-1].awaits_steps if _running.fits else True


def active_progress() -> FitProgress | None:
    """Returns the recorder of the progress of the innermost `fit`; None without a run folder."""
    return _running.fits[-1].progress if _running.fits else None


def call_after_fit(function: Callable[[], object]) -> None:
    """Calls a function when the active `fit` of this thread returns or fails.

    Keras calls `on_train_end` only if no error is raised.
    """
    if _running.fits:
        _running.fits[-1].exits.callback(function)


def recorded_fit(original: Callable[..., Any]) -> Any:
    """Returns `fit` that is recorded as active while it runs."""

    @functools.wraps(original)
    def fit(self: keras.Model, *args: object, **kwargs: object) -> Any:
        with _begun():
            return original(self, *args, **kwargs)

    return filters_traceback(fit)


@contextlib.contextmanager
def _begun() -> Generator[None]:
    _running.fits.append(_Fit())
    try:
        with _running.fits[-1].exits:
            yield
    finally:
        iterator = _running.fits.pop().iterator
        position = getattr(getattr(iterator, "data_adapter", None), "position", None)
        # Frames that hold the iterator must not keep its data alive.
        if position is not None:
            position.release()


def recorded_iterator(original: Callable[..., Any]) -> Any:
    """Returns `JAXEpochIterator.__init__` that records the iterator of the active `fit`."""

    @functools.wraps(original)
    def made(self: JAXEpochIterator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        _running.latest = weakref.ref(self)
        if _running.fits and _running.fits[-1].iterator is None:
            _running.fits[-1].iterator = self

    return made


def ordering_callbacks(original: Callable[..., Any]) -> Any:
    """Returns `CallbackList.__init__` that orders callbacks by `runs_first` and `runs_last`.

    A callback that runs last also gets the list, as `callback_list`.
    """

    @functools.wraps(original)
    def made(
        self: keras.callbacks.CallbackList,
        callbacks: object = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        # Keras would call a single callback in another thread while the next step reuses memory.
        alone = isinstance(callbacks, keras.callbacks.Callback)
        original(self, [callbacks] if alone else callbacks, *args, **kwargs)
        self.callbacks.sort(
            key=lambda one: (not getattr(one, "runs_first", False), _runs_last(one))
        )
        for callback in filter(_runs_last, self.callbacks):
            callback.callback_list = self
        if _running.fits:
            events = current_events()
            if events is not None and "epochs" in kwargs:
                progress = FitProgress(events, kwargs["epochs"], kwargs.get("steps"))
                _running.fits[-1].progress = progress
                self.callbacks.append(progress)
            _running.fits[-1].awaits_steps = not calls_in_thread(self) and any(
                map(_awaits_steps, self.callbacks)
            )

    return made


def _runs_last(callback: keras.callbacks.Callback) -> bool:
    return getattr(callback, "runs_last", False)


def _awaits_steps(callback: keras.callbacks.Callback) -> bool:
    return getattr(callback, "awaits_steps", False) or uses_batch_logs(callback)


def acts_on_batches(callback: keras.callbacks.Callback) -> bool:
    """Returns True if a callback does something before or after each batch, other than drawing."""
    if not getattr(callback, "needs_batch_logs", True):
        return False
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    return _overrides(
        callback, ("on_batch_begin", "on_train_batch_begin", "on_test_batch_begin")
    ) or (uses_batch_logs(callback))


def uses_batch_logs(callback: keras.callbacks.Callback) -> bool:
    """Returns True if a callback reads batch logs; `needs_batch_logs=False` overrides."""
    if not getattr(callback, "needs_batch_logs", True):
        return False
    return _overrides(callback, ("on_batch_end", "on_train_batch_end", "on_test_batch_end"))


def _overrides(callback: keras.callbacks.Callback, hooks: Sequence[str]) -> bool:
    base = keras.callbacks.Callback
    # Read from the object: LambdaCallback sets its hooks on the instance.
    methods = [(getattr(callback, hook), getattr(base, hook)) for hook in hooks]
    return any(getattr(method, "__func__", None) is not default for method, default in methods)
