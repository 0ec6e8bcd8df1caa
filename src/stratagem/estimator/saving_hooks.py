"""Hooks that write files: checkpoints, summaries, speed and profiles."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from stratagem.estimator.checks import check_instances, check_one_of, check_unsupported
from stratagem.estimator.hooks import (
    Clock,
    SecondOrStepTimer,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
    SynchronizedTimer,
)
from stratagem.estimator.spec import ModeKeys
from stratagem.estimator.steps import CHECKPOINT_NAME
from stratagem.execution import summary
from stratagem.strategies.collectives import host

if TYPE_CHECKING:
    from stratagem.estimator.loops import Session
    from stratagem.estimator.spec import Scaffold


_logger = logging.getLogger(__name__)


class CheckpointSaverListener:
    """Base class for code that runs before and after each checkpoint. All methods are optional.

    Example:
        >>> class Printer(sg.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print(f"saved at {global_step_value}")

    Source: TF 2.21 basic_session_run_hooks.py, CheckpointSaverListener.
    """

    def begin(self) -> None:
        """Called once, before variables are created or restored."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Called before each save.

        Args:
            session: the training session.
            global_step_value: the global step.
        """

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Called after each save.

        Args:
            session: the training session.
            global_step_value: the global step.

        Returns:
            True to stop training.
        """

    def end(self, session: Session, global_step_value: int) -> None:
        """Called once, after the last step and its save.

        Args:
            session: the training session.
            global_step_value: the global step.
        """


class CheckpointSaverHook(SessionRunHook):
    """Saves a checkpoint at the start, every N steps or N seconds, and at the end.

    All processes of a cluster save after the same step, by the first process's clock. If a
    listener of any process requests a stop, all of them stop.

    Args:
        checkpoint_dir: the folder; without a `saver`, the Estimator's.
        save_secs: seconds between checkpoints.
        save_steps: steps between checkpoints.
        saver: an object whose `save(session)` returns a path; replaces the session's saving.
        checkpoint_basename: the prefix of checkpoint names; changing it requires a `saver`.
        scaffold: a scaffold whose `saver` to use, if any.
        listeners: `CheckpointSaverListener` objects.
        clock: returns the time in seconds.

    Raises:
        TypeError: if a listener has the wrong type.
        ValueError: unless exactly one of seconds and steps is set; if both a saver and a scaffold
            are set, or the session does not save under this folder or name.

    Example:
        >>> hook = sg.estimator.CheckpointSaverHook("model", save_steps=500)

    Source: TF 2.21 basic_session_run_hooks.py, CheckpointSaverHook.
    """

    def __init__(
        self,
        checkpoint_dir: str | os.PathLike[str],
        save_secs: float | None = None,
        save_steps: int | None = None,
        saver: Any = None,
        checkpoint_basename: str = CHECKPOINT_NAME,
        scaffold: Scaffold | None = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        check_one_of("CheckpointSaverHook", is_required=False, saver=saver, scaffold=scaffold)
        self._saver = saver if scaffold is None else scaffold.saver
        if self._saver is None and checkpoint_basename != CHECKPOINT_NAME:
            raise ValueError(
                f"checkpoint_basename={checkpoint_basename!r} is set without a saver: omit it."
            )
        self._checkpoint_dir = os.fspath(checkpoint_dir)
        self._timer = SynchronizedTimer(save_secs, save_steps, clock=clock)
        self._listeners = check_instances("listeners", listeners, CheckpointSaverListener)

    def add_listeners(self, listeners: Sequence[CheckpointSaverListener]) -> None:
        """Adds listeners.

        Args:
            listeners: `CheckpointSaverListener` objects.
        """
        self._listeners = (*self._listeners, *listeners)

    def begin(self) -> None:
        """Resets the timer and calls the listeners."""
        self._timer.reset()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: object) -> None:
        """Saves the initial checkpoint."""
        folders = (Path(one).resolve() for one in (self._checkpoint_dir, session.model_dir))
        if self._saver is None and len(set(folders)) > 1:
            raise ValueError(
                f"checkpoint_dir={self._checkpoint_dir!r} is not the Estimator's folder: pass "
                "estimator.model_dir, or a saver that saves elsewhere."
            )
        step = session.global_step
        self._save(session, step)
        self._timer.update_last_triggered_step(step)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Saves a checkpoint when due."""
        step = run_context.session.global_step
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            if self._save(run_context.session, step):
                run_context.request_stop()

    def end(self, session: Session) -> None:
        """Saves the last step unless already saved, and calls the listeners."""
        step = session.global_step
        if step != self._timer.last_triggered_step():
            self._save(session, step)
            self._timer.update_last_triggered_step(step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Session, step: int) -> bool:
        """Saves a checkpoint; returns True if a listener of any process requests a stop."""
        for listener in self._listeners:
            listener.before_save(session, step)
        path = session.save_checkpoint() if self._saver is None else self._saver.save(session)
        _logger.info("Saved the checkpoint of step %d: %s.", step, path)
        stops = [bool(listener.after_save(session, step)) for listener in self._listeners]
        votes = host.all_gather_object(any(stops), name="whether a listener stops training")
        if any(votes):
            _logger.info("A checkpoint listener stops training at step %d.", step)
        return any(votes)


# StepCounterHook and SummarySaverHook.


class _SummaryHook(SessionRunHook):
    """Writes summaries when due: to a given writer, the session's, or one for another folder."""

    def __init__(
        self,
        timer: SecondOrStepTimer,
        output_dir: str | os.PathLike[str] | None,
        summary_writer: object,
    ) -> None:
        self._timer = timer
        self._folder = None if output_dir is None else Path(output_dir).resolve()
        self._given_writer = summary_writer
        self._writer: Any = None
        self._is_own = False

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()

    def after_create_session(self, session: Session, coord: object) -> None:
        """Opens the summary writer."""
        self._writer = self._given_writer
        if self._writer is not None or self._folder is None or not session.is_chief:
            return
        if self._folder == Path(session.model_dir).resolve():
            self._writer = session.summary_writer
        else:
            self._writer, self._is_own = summary.create_file_writer(str(self._folder)), True

    def end(self, session: Session) -> None:
        """Flushes the summary writer, and closes it if the hook created it."""
        if self._writer is not None:
            self._writer.close() if self._is_own else self._writer.flush()
        self._writer, self._is_own = None, False

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        if self._writer is not None:
            with self._writer.as_default(step):
                for tag, value in values.items():
                    summary.scalar(tag, value)


_TAG = "global_step/sec"


class StepCounterHook(_SummaryHook):
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
        timer = SecondOrStepTimer(every_n_secs, every_n_steps, clock=clock)
        super().__init__(timer, output_dir, summary_writer)

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Measures the speed when due."""
        step = run_context.session.global_step
        if not self._timer.should_trigger_for_step(step):
            return
        elapsed_s, num_steps = self._timer.update_last_triggered_step(step)
        if elapsed_s and num_steps is not None:
            steps_per_s = num_steps / elapsed_s
            _logger.info("%s: %g", _TAG, steps_per_s)
            self._write({_TAG: steps_per_s}, step)


# SummarySaverHook: periodic summaries of step values.


class SummarySaverHook(_SummaryHook):
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
        NotImplementedError: if `scaffold` is set.
        ValueError: unless exactly one of steps and seconds is set; or if `summary_op` is missing.

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
        check_unsupported("scaffold", scaffold)
        if summary_op is None:
            raise ValueError('summary_op is missing: pass {"tag": value}, names, or one name.')
        if isinstance(summary_op, Mapping):
            self.tensors = dict(summary_op)
        else:
            names = [summary_op] if isinstance(summary_op, str) else summary_op
            self.tensors = {name: name for name in names}
        timer = SecondOrStepTimer(save_secs, save_steps, clock=clock)
        super().__init__(timer, output_dir, summary_writer)
        self._is_due = False

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
            self._write(run_values.results, step)


# ProfilerHook: periodic profiles of single steps.


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
