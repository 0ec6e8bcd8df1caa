"""Summaries of training steps and evaluations."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from stratagem.estimator.hooks.timers import SecondOrStepTimer
from stratagem.execution import summary

_logger = logging.getLogger(__name__)


def writer_of(folder: str) -> summary.SummaryWriter:
    """Returns a folder's summary writer; it writes nothing if TensorBoard is not installed."""
    if importlib.util.find_spec("tensorboard") is None:
        _logger.warning(
            "Not writing summaries to %s: pip install 'stratagem[tensorboard]' first.", folder
        )
        return summary.create_noop_writer()
    return summary.create_file_writer(folder)


def write_results(folder: str, results: Mapping[str, Any], step: int) -> None:
    """Writes the scalar metrics of an evaluation."""
    writer = writer_of(folder)
    with writer.as_default(step=step):
        for name, value in results.items():
            if np.ndim(value) == 0:
                summary.scalar(name, value)
    writer.close()


class TrainingSummaries:
    """Records summaries every `save_steps` training steps; None or 0 for never."""

    def __init__(self, folder: str, save_steps: int | None) -> None:
        self.writer = writer_of(folder) if save_steps else summary.create_noop_writer()
        self._timer = SecondOrStepTimer(every_steps=save_steps) if save_steps else None
        self._records = True

    @contextlib.contextmanager
    def written(self) -> Generator[None]:
        """Makes the writer the default in the `with` block, and closes it afterwards."""
        try:
            with self.writer.as_default(), summary.record_if(lambda: self._records):
                yield
        finally:
            self.writer.close()

    @contextlib.contextmanager
    def of_step(self, step: int) -> Generator[None]:
        """Records the step's summaries inside the `with` block only if due."""
        is_due = self._timer is not None and self._timer.should_trigger_for_step(step)
        if self._timer is not None and is_due:
            self._timer.update_last_triggered_step(step)
            summary.experimental.set_step(step)
        self._records = is_due
        yield
        self._records = True
