"""StepCounterHook: steps per second."""

from __future__ import annotations

import logging
import os
import time

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.summary_output import SummaryOutput
from stratagem.estimator.hooks.timers import Clock, SecondOrStepTimer
from stratagem.messages import explain

_logger = logging.getLogger(__name__)

_TAG = "global_step/sec"


class StepCounterHook(SessionRunHook):
    """Logs steps per second and writes them as the summary `global_step/sec`.

    Args:
        every_n_steps: steps between measurements.
        every_n_secs: seconds between measurements.
        output_dir: the summary folder; None for no summary.
        summary_writer: a writer to use instead.
        clock: returns the time in seconds.

    Raises:
        ValueError: unless exactly one of steps and seconds is set.

    Example:
        >>> hook = sg.estimator.StepCounterHook(every_n_steps=100)

    Source: TF 2.21 basic_session_run_hooks.py, StepCounterHook.
    """

    def __init__(
        self,
        every_n_steps: int | None = 100,
        every_n_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: object = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if (every_n_steps is None) == (every_n_secs is None):
            raise ValueError(
                explain(
                    f"StepCounterHook received every_n_steps={every_n_steps} and "
                    f"every_n_secs={every_n_secs}.",
                    expected="exactly one of the two.",
                    fix="pass every_n_steps=None together with every_n_secs.",
                )
            )
        self._timer = SecondOrStepTimer(every_n_secs, every_n_steps, clock=clock)
        self._output = SummaryOutput(output_dir, summary_writer)

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()

    def after_create_session(self, session: Session, coord: object) -> None:
        """Opens the summary writer."""
        self._output.open(session)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Measures the speed when due."""
        step = run_context.session.global_step
        if not self._timer.should_trigger_for_step(step):
            return
        elapsed_s, num_steps = self._timer.update_last_triggered_step(step)
        if elapsed_s and num_steps is not None:
            steps_per_s = num_steps / elapsed_s
            _logger.info("%s: %g", _TAG, steps_per_s)
            self._output.write({_TAG: steps_per_s}, step)

    def end(self, session: Session) -> None:
        """Closes the summary writer."""
        self._output.close()
