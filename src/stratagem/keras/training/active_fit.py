"""The active `fit` call: its batch iterator and the order of its callbacks.

Keras does not expose these to callbacks.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import keras

from stratagem.devices.finding import device_memory
from stratagem.devices.lockstep import (
    InFlightProgram,
    last_program,
    record_program,
    wait_for_program,
)
from stratagem.keras.patches import patches
from stratagem.keras.private import JAXEpochIterator, calls_in_thread, pythonify_logs
from stratagem.observe.process_writer import (
    current_events,
    is_progress_due,
    sample_devices,
)
from stratagem.observe.wait_clock import DataWait, wait_clock
from stratagem.observe.writer import EventWriter

if TYPE_CHECKING:
    import jax

# Progress of `fit` in the run's events: loss and metrics, epochs, and the steps to come.


class FitProgress(keras.callbacks.Callback):
    """Records the logs of each epoch, and logs of steps that are read anyway every few seconds.

    Without `steps_per_epoch`, the total is unknown.
    """

    needs_batch_logs = False

    def __init__(
        self, events: EventWriter, num_epochs: int | None, steps_per_epoch: int | None
    ) -> None:
        super().__init__()
        self._events = events
        self._num_epochs = num_epochs
        self._steps_per_epoch = steps_per_epoch
        self._epoch = 0
        self._total_steps: int | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remembers the number of completed epochs, which a restored state may have changed."""
        del logs
        self._epoch = epoch

    def begin(self, num_done: int) -> None:
        """Records the number of steps to come; `num_done` were done before this `fit`."""
        steps = self._steps_per_epoch
        # In the middle of an epoch, a restored state has done a part of it.
        is_resumed = bool(steps) and num_done // (steps or 1) == self._epoch
        self._set_total(self._epoch * (steps or 0) if is_resumed else num_done)
        self.record({}, num_done)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Records the logs of an epoch."""
        self._epoch = epoch + 1
        # Steps on parameter servers are recorded by the workers.
        step = self._events.last_step or self._epoch * (self._steps_per_epoch or 0)
        self._set_total(step)
        self.record(logs or {}, step)

    def record_if_due(self, logs: Callable[[], Mapping[str, Any]]) -> None:
        """Records the logs of a step every few seconds."""
        if is_progress_due():
            self.record(logs(), self._events.last_step)

    def record(self, logs: Mapping[str, Any], step: int) -> None:
        """Records logs, without those that are no single numbers."""
        self._events.progress(
            dict(_numbers(logs)),
            step=step,
            total_steps=self._total_steps,
            epoch=self._epoch,
            num_epochs=self._num_epochs,
        )

    def _set_total(self, num_done: int) -> None:
        """Computes the total from the steps done before the next epoch."""
        if self._steps_per_epoch and self._num_epochs:
            left = max(0, self._num_epochs - self._epoch)
            self._total_steps = num_done + left * self._steps_per_epoch


def _numbers(logs: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in pythonify_logs(logs).items():  # flat, as Keras reports nested results
        try:
            yield name, float(value)
        except (RuntimeError, TypeError, ValueError):
            continue


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

    return fit


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


@patches(
    JAXEpochIterator,
    "__init__",
    why="callbacks that save the position in the data need the active iterator",
)
def recorded_iterator(original: Callable[..., Any]) -> Any:
    """Returns `JAXEpochIterator.__init__` that records the iterator of the active `fit`."""

    @functools.wraps(original)
    def made(self: JAXEpochIterator, *args: object, **kwargs: object) -> None:
        original(self, *args, **kwargs)
        _running.latest = weakref.ref(self)
        if _running.fits and _running.fits[-1].iterator is None:
            _running.fits[-1].iterator = self

    return made


@patches(
    keras.callbacks.CallbackList,
    "__init__",
    why="a backup is written after the other callbacks, whose state it holds",
)
def ordering_callbacks(original: Callable[..., Any]) -> Any:
    """Returns `CallbackList.__init__` that puts callbacks with `runs_last` last.

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
        self.callbacks.sort(key=_runs_last)
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


# Step events of `fit` in the run's event log.


class StepEvents:
    """Numbers a model's steps by its optimizer's count, which continues after a restore.

    The count is in device memory, so it is read only once per `fit`.
    """

    def __init__(self, model: keras.Model, events: EventWriter) -> None:
        self._model = model
        self._events = events
        self._num_done = 0
        self._is_new = True
        self._flight = InFlightProgram()
        self._progress: FitProgress | None = None
        sample_devices(device_memory)

    def begin(self) -> None:
        """Marks the state as possibly changed, so that the step count is read again."""
        self._is_new = True

    def run(
        self, call: Callable[[], tuple[int, Any]], values: Sequence[jax.Array] | None = None
    ) -> Any:
        """Runs a group of steps and writes its event when it is done.

        `call` returns the number of steps and the result, which `run` returns. `values` are the
        optimizer's variables if Keras holds them outside the variables. If no step's result is
        awaited anyway, waits for the previous group instead, so that devices are never idle.
        """
        is_awaited = self._is_new or awaits_each_step()
        if self._is_new:
            self._num_done = self._count(values)
            self._is_new = False
            self._progress = active_progress()
            if self._progress is not None:
                self._progress.begin(self._num_done)
        begin_s, waited, before = time.monotonic(), wait_clock.read(), self._flight
        num_steps, result = call()
        self._flight = last_program()
        wait_for_program(self._flight if is_awaited else before)
        self._num_done += num_steps
        self._events.step(
            self._num_done,
            num_steps=num_steps,
            duration_s=time.monotonic() - begin_s,
            waits=wait_clock.since(waited),
        )
        return result

    def report(self, logs: Callable[[], Mapping[str, Any]]) -> None:
        """Records logs of the latest step; they are read every few seconds."""
        if self._progress is not None:
            self._progress.record_if_due(logs)

    def _count(self, values: Sequence[jax.Array] | None) -> int:
        optimizer = getattr(self._model, "optimizer", None)
        variables = [] if optimizer is None else optimizer.variables
        for place, variable in enumerate(variables):
            # `optimizer.iterations` counts several steps of gradient accumulation as one.
            if variable.name == "iteration":
                return int(variable.value if values is None else values[place])
        return self._num_done


class ReportedTrainFunction:
    """The `train_function` of a model without a strategy, with step events."""

    def __init__(
        self, model: keras.Model, events: EventWriter, original: Callable[..., Any]
    ) -> None:
        self.events = StepEvents(model, events)
        self._model = model
        self._original = original

    def __call__(self, state: Sequence[Sequence[jax.Array]], iterator: Iterator[Any]) -> Any:
        """Runs a group of steps, as Keras's own function does."""

        def call() -> tuple[int, Any]:
            counted = _Counted(iterator)
            result = self._original(state, counted)
            record_program(result[0])  # the logs
            return counted.num_taken, result

        result = self.events.run(call, state[2])
        self.events.report(lambda: result[0])
        return result


class _Counted:
    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.num_taken = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with DataWait(wait_clock):
            batch = next(self._iterator)
        self.num_taken += 1
        return batch
