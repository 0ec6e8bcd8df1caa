"""SummarySaverHook: periodic summaries of step values."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.summary_output import SummaryOutput
from stratagem.estimator.hooks.timers import Clock, SecondOrStepTimer
from stratagem.messages import explain


class SummarySaverHook(SessionRunHook):
    """Writes scalar summaries every N steps or N seconds.

    Calls of `sg.summary` in the model function don't need this hook: they are written every
    `save_summary_steps` steps of the `RunConfig`.

    Args:
        save_steps: steps between summaries; the first step is written.
        save_secs: seconds between summaries.
        output_dir: the output folder.
        summary_writer: a writer to use instead.
        scaffold: must be None; a scaffold has no summaries.
        summary_op: a dict from tags to names or model function values; or one or more names, used
            as tags.
        clock: returns the time in seconds.

    Attributes:
        tensors: a dict from tags to names or values.

    Raises:
        ValueError: unless exactly one of steps and seconds is set; if `summary_op` is missing, or
            `scaffold` is set.

    Example:
        >>> hook = sg.estimator.SummarySaverHook(10, output_dir="logs", summary_op={"l": "loss"})

    Source: TF 2.21 basic_session_run_hooks.py, SummarySaverHook.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: object = None,
        scaffold: object = None,
        summary_op: Mapping[str, Any] | Iterable[str] | str | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if summary_op is None or scaffold is not None:
            raise ValueError(
                explain(
                    f"SummarySaverHook received summary_op={summary_op!r}, scaffold={scaffold!r}.",
                    expected="a summary_op and no scaffold, which has no summaries.",
                    fix='pass summary_op={"tag": value}, or call sg.summary in the model function.',
                )
            )
        if isinstance(summary_op, Mapping):
            self.tensors = dict(summary_op)
        else:
            names = [summary_op] if isinstance(summary_op, str) else summary_op
            self.tensors = {name: name for name in names}
        self._timer = SecondOrStepTimer(save_secs, save_steps, clock=clock)
        self._output = SummaryOutput(output_dir, summary_writer)
        self._is_due = False

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()

    def after_create_session(self, session: Session, coord: object) -> None:
        """Opens the summary writer."""
        self._output.open(session)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetches the values when due."""
        step = run_context.session.global_step + 1
        self._is_due = self._timer.should_trigger_for_step(step)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the values."""
        if self._is_due:
            step = run_context.session.global_step
            self._timer.update_last_triggered_step(step)
            self._output.write(run_values.results, step)

    def end(self, session: Session) -> None:
        """Closes the summary writer."""
        self._output.close()
