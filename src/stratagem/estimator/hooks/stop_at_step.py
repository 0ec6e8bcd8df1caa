"""StopAtStepHook: stops training at a step."""

from __future__ import annotations

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.messages import explain


class StopAtStepHook(SessionRunHook):
    """Stops training after a number of steps, or at a global step.

    Args:
        num_steps: the number of steps from the start of this run.
        last_step: the global step to stop at.

    Raises:
        ValueError: unless exactly one of the two is set.

    Example:
        >>> hook = sg.estimator.StopAtStepHook(last_step=1000)

    Source: TF 2.21 basic_session_run_hooks.py, StopAtStepHook.
    """

    def __init__(self, num_steps: int | None = None, last_step: int | None = None) -> None:
        if (num_steps is None) == (last_step is None):
            raise ValueError(
                explain(
                    f"StopAtStepHook received num_steps={num_steps} and last_step={last_step}.",
                    expected="exactly one of the two.",
                    fix="pass num_steps for additional steps, or last_step for a global step.",
                )
            )
        self._num_steps = num_steps
        self._last_step = last_step

    def after_create_session(self, session: Session, coord: object) -> None:
        """Computes the last step."""
        if self._last_step is None:
            assert self._num_steps is not None
            self._last_step = session.global_step + self._num_steps

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Requests a stop at the last step."""
        assert self._last_step is not None
        if run_context.session.global_step >= self._last_step:
            run_context.request_stop()
