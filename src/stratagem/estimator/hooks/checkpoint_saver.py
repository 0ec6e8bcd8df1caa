"""Saves checkpoints while training goes on, and tells listeners."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stratagem.collectives import host
from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.hooks.timers import AgreedTimer, Clock
from stratagem.messages import explain

__all__ = ["CheckpointSaverHook", "CheckpointSaverListener", "check_listeners"]

_logger = logging.getLogger(__name__)

_BASENAME = "model.ckpt"


class CheckpointSaverListener:
    """Code that is called around each checkpoint. Override what is needed.

    Example:
        >>> class Printer(sg.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print(f"saved at {global_step_value}")

    Source: TF 2.21 basic_session_run_hooks.py, CheckpointSaverListener.
    """

    def begin(self) -> None:
        """Called once, before the variables are made or restored."""

    def before_save(self, session: Session, global_step_value: int) -> None:
        """Called before each save.

        Args:
            session: the loop.
            global_step_value: the global step.
        """

    def after_save(self, session: Session, global_step_value: int) -> bool | None:
        """Called after each save.

        Args:
            session: the loop.
            global_step_value: the global step.

        Returns:
            True to end training.
        """

    def end(self, session: Session, global_step_value: int) -> None:
        """Called once, after the last step and its save.

        Args:
            session: the loop.
            global_step_value: the global step.
        """


class CheckpointSaverHook(SessionRunHook):
    """Saves at the start, every N steps or N seconds, and at the end.

    All processes of a cluster save together, after the same step, by the clock of the first. They
    end together, too, where a listener of one of them asks for that.

    Args:
        checkpoint_dir: the folder; that of the Estimator, unless there is a `saver`.
        save_secs: seconds in between.
        save_steps: steps in between.
        saver: saves instead of the session: an object whose `save(session)` returns a path.
        checkpoint_basename: how names of checkpoints begin; another one needs a `saver`.
        scaffold: whose `saver` to use, if it has one.
        listeners: `CheckpointSaverListener` objects.
        clock: tells the time in seconds.

    Raises:
        TypeError: a listener of another type.
        ValueError: not one of seconds and steps, both a saver and a scaffold, or a folder or a name
            that the session does not save under.

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
        checkpoint_basename: str = _BASENAME,
        scaffold: Any = None,
        listeners: Sequence[CheckpointSaverListener] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if saver is not None and scaffold is not None:
            raise ValueError(
                explain(
                    "CheckpointSaverHook got both a saver and a scaffold.",
                    expected="one of them at most.",
                    fix="leave the scaffold out: the saver saves.",
                )
            )
        self._saver = saver if scaffold is None else scaffold.saver
        if self._saver is None and checkpoint_basename != _BASENAME:
            raise ValueError(
                explain(
                    f"checkpoint_basename={checkpoint_basename!r} is not how the session names "
                    "checkpoints.",
                    expected=f"{_BASENAME!r}, or a saver that names them.",
                    fix="leave checkpoint_basename out.",
                )
            )
        self._checkpoint_dir = os.fspath(checkpoint_dir)
        self._timer = AgreedTimer(save_secs, save_steps, clock=clock)
        self._listeners = check_listeners("listeners", listeners)

    def add_listeners(self, listeners: Sequence[CheckpointSaverListener]) -> None:
        """Lets others be told, too.

        Args:
            listeners: those that `train` was given.
        """
        self._listeners = (*self._listeners, *listeners)

    def begin(self) -> None:
        """Tells the listeners."""
        self._timer.reset()
        for listener in self._listeners:
            listener.begin()

    def after_create_session(self, session: Session, coord: Any) -> None:
        """Saves what training begins with.

        Args:
            session: the loop.
            coord: not used.

        Raises:
            ValueError: the session saves into another folder.
        """
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
        """Saves where it is time.

        Args:
            run_context: the step.
            run_values: not used.
        """
        step = run_context.session.global_step
        if self._timer.should_trigger_for_step(step):
            self._timer.update_last_triggered_step(step)
            if self._save(run_context.session, step):
                run_context.request_stop()

    def end(self, session: Session) -> None:
        """Saves the last step, if it is not saved yet, and tells the listeners.

        Args:
            session: the loop.
        """
        step = session.global_step
        if step != self._timer.last_triggered_step():
            self._save(session, step)
            self._timer.update_last_triggered_step(step)
        for listener in self._listeners:
            listener.end(session, step)

    def _save(self, session: Session, step: int) -> bool:
        """Returns whether a listener, of any process, asks for the end."""
        for listener in self._listeners:
            listener.before_save(session, step)
        path = session.save_checkpoint() if self._saver is None else self._saver.save(session)
        _logger.info("Saved the checkpoint of step %d: %s.", step, path)
        stops = [bool(listener.after_save(session, step)) for listener in self._listeners]
        told = host.all_gather_object(any(stops), name="whether a listener ends training")
        if any(told):
            _logger.info("A listener of checkpoints ends training at step %d.", step)
        return any(told)


def check_listeners(name: str, listeners: Any) -> tuple[CheckpointSaverListener, ...]:
    """Returns the listeners of an argument.

    Args:
        name: of the argument.
        listeners: a list of them, or None.

    Returns:
        All of them.

    Raises:
        TypeError: no list, or another type in it.
    """
    given = () if listeners is None else listeners
    if not isinstance(given, list | tuple) or not all(
        isinstance(listener, CheckpointSaverListener) for listener in given
    ):
        raise TypeError(
            explain(
                f"{name}={listeners!r} are not all listeners.",
                expected="a list of CheckpointSaverListener objects.",
                fix="derive the classes from sg.estimator.CheckpointSaverListener.",
            )
        )
    return tuple(given)


def _same(folder: str, other: str) -> bool:
    return Path(folder).resolve() == Path(other).resolve()
