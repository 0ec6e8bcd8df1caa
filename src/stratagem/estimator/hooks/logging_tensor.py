"""LoggingTensorHook: periodic logging of step values."""

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
from stratagem.estimator.number_checks import check_minimum
from stratagem.messages import explain

_logger = logging.getLogger(__name__)


class LoggingTensorHook(SessionRunHook):
    """Logs values every N steps, every N seconds, or at the end.

    Writes to the logger `stratagem.estimator` at level INFO;
    `logging.basicConfig(level="INFO")` shows it.

    Args:
        tensors: a dict from tags to names or model function values; or names, used as tags.
        every_n_iter: steps of this process between log lines; the first step is logged.
        every_n_secs: seconds between log lines.
        at_end: True to also log after the last step. Without an interval, only then.
        formatter: turns the dict of values into a log line.
        clock: returns the time in seconds.

    Attributes:
        tensors: a dict from tags to names or values.

    Raises:
        ValueError: if both intervals are set, neither is set without `at_end`, or `every_n_iter`
            is below 1.

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
                    f"LoggingTensorHook received every_n_iter={every_n_iter} and "
                    f"every_n_secs={every_n_secs}.",
                    expected="exactly one of the two, or at_end=True.",
                    fix="pass every_n_iter=100, for example.",
                )
            )
        check_minimum("every_n_iter", every_n_iter, 1)
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
        """Resets the timer and the step count."""
        self._timer.reset()
        self._num_steps = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetches the values when due."""
        self._is_due = self._timer.should_trigger_for_step(self._num_steps)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the fetched values."""
        if self._is_due:
            self._log(run_values.results)
        self._num_steps += 1

    def end(self, session: Session) -> None:
        """Logs the values of the last step if `at_end` is set."""
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
