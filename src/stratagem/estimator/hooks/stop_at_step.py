"""Ends training at a step."""

from __future__ import annotations

from typing import Any

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.messages import explain

__all__ = ["StopAtStepHook"]


class StopAtStepHook(SessionRunHook):
    """Ends training after a number of steps, or when the global step has reached a number.

    Args:
        num_steps: steps of this run, counted from where it begins.
        last_step: the global step.

    Raises:
        ValueError: neither, or both.

    Example:
        >>> hook = sg.estimator.StopAtStepHook(last_step=1000)

    Source: TF 2.21 basic_session_run_hooks.py, StopAtStepHook.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                explain(
                    f"StopAtStepHook got num_steps={num_steps} and last_step={last_step}.",
                    expected="one of the two.",
                    fix="pass num_steps for so many more, last_step for a global step.",
                )
            )
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Finds out the last step.

        Args:
            session: the loop.
            coord: not used.
        """
        if self._last_step is None:
            assert self._num_steps is not None
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Asks for the end at the last step.

        Args:
            run_context: the step.
            run_values: not used.
        """
        assert self._last_step is not None
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()
