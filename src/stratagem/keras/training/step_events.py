"""Step events of `fit` in the run's event log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stratagem.devices.background import InFlightProgram
from stratagem.devices.devices import device_memory
from stratagem.devices.lockstep import last_program, record_program, wait_for_program
from stratagem.keras.training.active_fit import active_progress, awaits_each_step
from stratagem.keras.training.fit_progress import FitProgress
from stratagem.observe.run_events.process_writer import sample_devices
from stratagem.observe.run_events.wait_clock import DataWait, wait_clock
from stratagem.observe.run_events.writer import EventWriter

if TYPE_CHECKING:
    import jax
    import keras


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
