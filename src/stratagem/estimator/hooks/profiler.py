"""ProfilerHook: periodic profiles of single steps."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import jax

from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import Clock, SecondOrStepTimer
from stratagem.estimator.mode_keys import ModeKeys

_logger = logging.getLogger(__name__)


class ProfilerHook(SessionRunHook):
    """Profiles one step every N steps or N seconds with JAX's profiler.

    Each profile is written to `timeline-<step>`, for TensorBoard's profile plugin. Its
    `perfetto_trace.json.gz` opens in ui.perfetto.dev.

    Args:
        save_steps: steps between profiles; the first step is profiled.
        save_secs: seconds between profiles.
        output_dir: the output folder.
        show_dataflow: ignored.
        show_memory: ignored.
        clock: returns the time in seconds.

    Raises:
        ValueError: unless exactly one of steps and seconds is set.

    Example:
        >>> hook = sg.estimator.ProfilerHook(save_steps=1000, output_dir="profiles")

    Source: TF 2.21 basic_session_run_hooks.py, ProfilerHook; JAX, jax.profiler.start_trace.
    """

    def __init__(
        self,
        save_steps: int | None = None,
        save_secs: float | None = None,
        output_dir: str | os.PathLike[str] = "",
        show_dataflow: bool = True,
        show_memory: bool = False,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        del show_dataflow, show_memory
        self._output_dir = Path(output_dir)
        self._timer = SecondOrStepTimer(save_secs, save_steps, clock=clock)
        self._is_tracing = False

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()
        self._is_tracing = False

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Starts a profile when due."""
        step = run_context.session.global_step + 1
        if not self._timer.should_trigger_for_step(step):
            return None
        folder = self._output_dir / f"timeline-{step}"
        jax.profiler.start_trace(folder, create_perfetto_trace=True)
        self._is_tracing = True
        is_prediction = run_context.session.mode == ModeKeys.PREDICT
        return SessionRunArgs("global_step" if is_prediction else "loss")

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Writes the profile."""
        if self._is_tracing:
            self._stop()
            step = run_context.session.global_step
            self._timer.update_last_triggered_step(step)
            _logger.info("Wrote the profile of step %d to %s.", step, self._output_dir)

    def end(self, session: Session) -> None:
        """Stops a profile whose step never ran."""
        if self._is_tracing:
            self._stop()

    def _stop(self) -> None:
        self._is_tracing = False
        jax.profiler.stop_trace()
