"""Writes values of the step as summaries."""

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

__all__ = ["SummarySaverHook"]


class SummarySaverHook(SessionRunHook):
    """Writes scalars every N steps or N seconds.

    For summaries that no call of `sg.summary` in the model function writes: those are written
    every `save_summary_steps` steps of the `RunConfig`.

    Args:
        save_steps: steps in between; the first one is written.
        save_secs: seconds in between.
        output_dir: where to write.
        summary_writer: what to write with instead.
        scaffold: None; a scaffold has no summaries.
        summary_op: tag to a name or a value of the model function; or a name, or several, which are
            their own tags.
        clock: tells the time in seconds.

    Attributes:
        tensors: tag to name or value.

    Raises:
        ValueError: not one of steps and seconds, no `summary_op`, or a scaffold.

    Example:
        >>> hook = sg.estimator.SummarySaverHook(10, output_dir="logs", summary_op={"l": "loss"})

    Source: TF 2.21 basic_session_run_hooks.py, SummarySaverHook.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        summary_writer: Any = None,
        scaffold: Any = None,
        summary_op: Mapping[str, Any] | Iterable[str] | str | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if summary_op is None or scaffold is not None:
            raise ValueError(
                explain(
                    f"SummarySaverHook got summary_op={summary_op!r} and scaffold={scaffold!r}.",
                    expected="a summary_op, and no scaffold: it holds no summaries here.",
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
        """Counts anew."""
        self._timer.reset()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Opens the output.

        Args:
            session: the loop.
            coord: not used.
        """
        self._output.open(session)

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Asks for the values, where it is time.

        Args:
            run_context: the step.

        Returns:
            The fetches, or None.
        """
        step = run_context.session.global_step + 1
        self._is_due = self._timer.should_trigger_for_step(step)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the values.

        Args:
            run_context: the step.
            run_values: of the tensors.
        """
        if self._is_due:
            step = run_context.session.global_step
            self._timer.update_last_triggered_step(step)
            self._output.write(run_values.results, step)

    def end(self, session: Session) -> None:
        """Closes the output.

        Args:
            session: the loop.
        """
        self._output.close()
