"""Progress of `fit` in the run's events: loss and metrics, epochs, and the steps to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras

from stratagem.keras.private import pythonify_logs
from stratagem.observe.run_events.process_writer import is_progress_due
from stratagem.observe.run_events.writer import EventWriter


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
