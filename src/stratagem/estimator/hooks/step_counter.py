"""StepCounterHook: steps per second."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import Clock, SecondOrStepTimer
from stratagem.execution import summary

# Summary output of hooks.


class SummaryOutput:
    """Summary writer of a hook: an external one, the session's, or a new one for another folder."""

    def __init__(self, output_dir: str | os.PathLike[str] | None, summary_writer: object) -> None:
        self._folder = None if output_dir is None else Path(output_dir).resolve()
        self._external_writer = summary_writer
        self._writer: Any = None
        self._is_own = False

    def open(self, session: Session) -> None:
        """Chooses the writer."""
        self._writer = self._external_writer
        if self._writer is not None or self._folder is None or not session.is_chief:
            return
        if self._folder == Path(session.model_dir).resolve():
            self._writer = session.summary_writer
        else:
            self._writer, self._is_own = summary.create_file_writer(str(self._folder)), True

    def write(self, values: Mapping[str, Any], step: int) -> None:
        """Writes scalars, if there is a writer."""
        if self._writer is not None:
            with self._writer.as_default(step):
                for tag, value in values.items():
                    summary.scalar(tag, value)

    def close(self) -> None:
        """Flushes the writer, and closes it if the hook created it."""
        if self._writer is not None:
            self._writer.close() if self._is_own else self._writer.flush()
        self._writer, self._is_own = None, False


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


# SummarySaverHook: periodic summaries of step values.


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
