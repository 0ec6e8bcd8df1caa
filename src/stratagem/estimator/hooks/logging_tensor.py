"""Logs values of the step, every so often."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import Clock, NeverTriggerTimer, SecondOrStepTimer
from stratagem.messages import explain

__all__ = ["LoggingTensorHook"]

_logger = logging.getLogger(__name__)


class LoggingTensorHook(SessionRunHook):
    """Logs values every N steps, every N seconds, or at the end.

    They go to the logger `stratagem.estimator`, with level INFO, which
    `logging.basicConfig(level="INFO")` shows.

    Args:
        tensors: tag to a name or a value of the model function; or several names, which are their
            own tags.
        every_n_iter: steps of this process in between; the first one is logged.
        every_n_secs: seconds in between.
        at_end: log after the last step, too; with neither number, only then.
        formatter: turns the dict of values into a line.
        clock: tells the time in seconds.

    Attributes:
        tensors: tag to name or value.

    Raises:
        ValueError: both numbers, no number and not at the end, or a number below 1.

    Example:
        >>> hook = sg.estimator.LoggingTensorHook({"loss": "loss"}, every_n_iter=100)
        >>> hook.tensors
        {'loss': 'loss'}

    Source: TF 2.21 basic_session_run_hooks.py, LoggingTensorHook.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        has_interval = (every_n_iter is None) != (every_n_secs is None)
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not (has_interval or only_at_end):
            raise ValueError(
                explain(
                    f"LoggingTensorHook got every_n_iter={every_n_iter} and "
                    f"every_n_secs={every_n_secs}.",
                    expected="one of the two, or at_end=True.",
                    fix="pass every_n_iter=100, for example.",
                )
            )
        if every_n_iter is not None and every_n_iter <= 0:
            raise ValueError(
                explain(
                    f"every_n_iter={every_n_iter} is out of range.",
                    expected="a number of steps, at least 1.",
                    fix="leave it out and pass at_end=True to log only then.",
                )
            )
        if isinstance(tensors, Mapping):
            self.tensors: dict[str, Any] = {tag: tensors[tag] for tag in sorted(tensors)}
        else:
            self.tensors = {name: name for name in tensors}
        self._formatter = formatter
        self._at_end = at_end
        self._timer = (
            NeverTriggerTimer()
            if only_at_end
            else SecondOrStepTimer(every_n_secs, every_n_iter, clock=clock)
        )
        self._num_steps = 0
        self._is_due = False

    def begin(self) -> None:
        """Counts steps anew."""
        self._timer.reset()
        self._num_steps = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values of a step that is logged.

        Args:
            run_context: the step.

        Returns:
            The fetches, or None.
        """
        self._is_due = self._timer.should_trigger_for_step(self._num_steps)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the values.

        Args:
            run_context: the step.
            run_values: of the tensors.
        """
        if self._is_due:
            self._log(run_values.results)
        self._num_steps += 1

    def end(self, session: Session) -> None:
        """Logs the values of the last step, if that was asked for.

        Args:
            session: the loop.
        """
        if self._at_end:
            self._log(session.run(self.tensors))

    def _log(self, values: dict[str, Any]) -> None:
        elapsed_s, _ = self._timer.update_last_triggered_step(self._num_steps)
        if self._formatter is not None:
            _logger.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            line = ", ".join(f"{tag} = {values[tag]}" for tag in self.tensors)
        _logger.info("%s", line if elapsed_s is None else f"{line} ({elapsed_s:.3f} sec)")
