"""CheckpointSaverHook and listeners: periodic checkpoints during training."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stratagem.devices.collectives import host
from stratagem.errors import explain
from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import Clock, SynchronizedTimer
from stratagem.estimator.spec import check_instances

if TYPE_CHECKING:
    from stratagem.estimator.spec import Saver, Scaffold


_logger = logging.getLogger(__name__)

_BASENAME = "model.ckpt"


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
        saver: Saver | None = None,
        checkpoint_basename: str = _BASENAME,
        scaffold: Scaffold | None = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError(
                explain(
                    "CheckpointSaverHook received both a saver and a scaffold.",
                    expected="at most one of them.",
                    fix="omit the scaffold: the saver replaces it.",
                )
            )
        self._saver = saver if scaffold is None else scaffold.saver
        if self._saver is None and checkpoint_basename != _BASENAME:
            raise ValueError(
                explain(
                    f"checkpoint_basename={checkpoint_basename!r} is set without a saver.",
                    expected=f"{_BASENAME!r}, or a saver that uses another name.",
                    fix="omit checkpoint_basename.",
                )
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
        if self._saver is None and not _same(self._checkpoint_dir, session.model_dir):
            raise ValueError(
                explain(
                    f"checkpoint_dir={self._checkpoint_dir!r} is not the Estimator's folder.",
                    expected=f"{session.model_dir!r}, where the session saves.",
                    fix="pass estimator.model_dir, or a saver that saves elsewhere.",
                )
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


def _same(folder: str, other: str) -> bool:
    return Path(folder).resolve() == Path(other).resolve()
