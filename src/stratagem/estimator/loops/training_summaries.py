"""Summaries of an Estimator: of training every so many steps, and of each evaluation."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Generator, Mapping
from typing import Any

import numpy as np

from stratagem import summary
from stratagem.estimator.hooks import SecondOrStepTimer

__all__ = ["TrainingSummaries", "write_results", "writer_of"]

_logger = logging.getLogger("stratagem.estimator")


def writer_of(folder: str) -> summary.SummaryWriter:
    """Returns a writer for a folder; one that writes nothing where TensorBoard is not installed.

    Args:
        folder: of the summaries.
    """
    if importlib.util.find_spec("tensorboard") is None:
        _logger.warning(
            "No summaries are written to %s: pip install 'stratagem[tensorboard]' for them.", folder
        )
        return summary.create_noop_writer()
    return summary.create_file_writer(folder)


def write_results(folder: str, results: Mapping[str, Any], step: int) -> None:
    """Writes the metrics of an evaluation.

    Args:
        folder: of the evaluation's summaries.
        results: numbers by name; what has axes is left out.
        step: the global step of what was evaluated.
    """
    writer = writer_of(folder)
    with writer.as_default(step=step):
        for name, value in results.items():
            if np.ndim(value) == 0:
                summary.scalar(name, value)
    writer.close()


class TrainingSummaries:
    """Lets the steps of a training write summaries, every so many steps.

    Args:
        folder: of the summaries.
        save_steps: steps in between; None or 0 for none.
    """

    def __init__(self, folder: str, save_steps: int | None) -> None:
        self.writer = writer_of(folder) if save_steps else summary.create_noop_writer()
        self._timer = SecondOrStepTimer(every_steps=save_steps) if save_steps else None
        self._records = True

    @contextlib.contextmanager
    def written(self) -> Generator[None]:
        """Makes the writer the default one in a `with` block, and closes it then."""
        try:
            with self.writer.as_default(), summary.record_if(lambda: self._records):
                yield
        finally:
            self.writer.close()

    @contextlib.contextmanager
    def of_step(self, step: int) -> Generator[None]:
        """What is run in a `with` block records if it is time; what hooks write always is.

        Args:
            step: what the global step will be after it.
        """
        is_due = self._timer is not None and self._timer.should_trigger_for_step(step)
        if self._timer is not None and is_due:
            self._timer.update_last_triggered_step(step)
            summary.experimental.set_step(step)
        self._records = is_due
        yield
        self._records = True
