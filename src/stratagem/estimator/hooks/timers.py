"""Timers that trigger hooks after a number of steps or seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from stratagem import settings
from stratagem.devices.collectives import host
from stratagem.errors import DeadlineExceededError, explain
from stratagem.estimator.hooks.session_run_hook import (
    Session,
    SessionRunArgs,
    SessionRunContext,
    SessionRunHook,
    SessionRunValues,
)
from stratagem.estimator.number_checks import check_minimum
from stratagem.group.current import current_group

Clock = Callable[[], float]

# Synchronization makes processes wait for each other, so it happens only this often.
_SYNC_EVERY_S = 1.0
_MAX_STEPS_BETWEEN_SYNCS = 1000


class SecondOrStepTimer:
    """Timer that triggers at the first step, then every N seconds or every N steps.

    Args:
        every_secs: seconds between triggers.
        every_steps: steps between triggers.
        clock: returns the time in seconds.

    Raises:
        ValueError: unless exactly one of the two is set, or if it is negative.

    Example:
        >>> timer = sg.estimator.SecondOrStepTimer(every_steps=10)
        >>> timer.should_trigger_for_step(3)
        True
        >>> timer.update_last_triggered_step(3)
        (None, None)
        >>> timer.should_trigger_for_step(12), timer.should_trigger_for_step(13)
        (False, True)

    Source: TF 2.21 basic_session_run_hooks.py, SecondOrStepTimer.
    """

    def __init__(
        self,
        every_secs: float | None = None,
        every_steps: int | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        if (every_secs is None) == (every_steps is None):
            raise ValueError(
                explain(
                    f"A timer received every_secs={every_secs} and every_steps={every_steps}.",
                    expected="exactly one of the two, seconds or steps.",
                    fix="set one of them and leave the other None.",
                )
            )
        if (every_secs or every_steps or 0) < 0:
            raise ValueError(
                explain(
                    f"A timer received a negative interval: every_secs={every_secs}, "
                    f"every_steps={every_steps}.",
                    expected="at least 0.",
                    fix="pass a positive interval.",
                )
            )
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets the last trigger: the next step triggers."""
        self._last_step: int | None = None
        self._last_time_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether a step should trigger.

        Args:
            step: the step number.

        Returns:
            True before the first trigger and after the interval; False at the last triggered step.
        """
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        return self._clock() >= self._last_time_s + self._every_secs

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Records a trigger.

        Args:
            step: the step number.

        Returns:
            Seconds and steps since the previous trigger; None for both at the first.
        """
        now_s, elapsed = self._clock(), (None, None)
        if self._last_step is not None:
            elapsed = now_s - self._last_time_s, step - self._last_step
        self._last_time_s, self._last_step = now_s, step
        return elapsed

    def last_triggered_step(self) -> int | None:
        """Returns the step of the last trigger.

        Returns:
            The step number, or None if it never triggered.
        """
        return self._last_step


class SynchronizedTimer(SecondOrStepTimer):
    """Timer that triggers at the same step on all processes in lockstep.

    All processes must call it with the same steps. The first process's clock decides. It also
    chooses the step of the next synchronization, so processes don't wait after every step.
    """

    def reset(self) -> None:
        """Forgets the last trigger: the next step triggers."""
        super().reset()
        self._synced_step: int | None = None
        self._synced_at_s = 0.0
        self._next_step = 0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns True if a step should trigger. Call on every process."""
        is_due = super().should_trigger_for_step(step)
        if self._every_steps is not None or current_group() is None:
            return is_due
        if step < self._next_step:
            return False
        proposal = {"is_due": is_due, "steps": self._steps_until_next(step)}
        decision = host.broadcast_object(proposal, name="whether a hook is due")
        self._next_step = step + decision["steps"]
        return decision["is_due"]

    def _steps_until_next(self, step: int) -> int:
        now_s, before, steps = self._clock(), self._synced_at_s, 1
        if self._synced_step is not None and now_s > before:
            steps = int((step - self._synced_step) * _SYNC_EVERY_S / (now_s - before))
        self._synced_step, self._synced_at_s = step, now_s
        return min(max(steps, 1), _MAX_STEPS_BETWEEN_SYNCS)


class NeverTriggerTimer:
    """Timer that never triggers, as in TensorFlow's basic_session_run_hooks.py."""

    def reset(self) -> None:
        """Does nothing."""

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns False."""
        return False

    def update_last_triggered_step(self, step: int) -> tuple[None, None]:
        """Returns None for both seconds and steps."""
        return None, None

    def last_triggered_step(self) -> None:
        """Returns None."""


# GlobalStepWaiterHook: delayed start of a worker.

_logger = logging.getLogger(__name__)

_POLL_EVERY_S = 0.5


class GlobalStepWaiterHook(SessionRunHook):
    """Waits before the first step until the global step reaches a number.

    For independent workers with parameter servers. In lockstep the global step cannot advance
    while one worker waits.

    Args:
        wait_until_step: the global step to wait for.
        timeout_s: the longest time without progress, in seconds; None for
            `STRATAGEM_JOIN_TIMEOUT_S`.
        clock: returns the time in seconds.
        sleep: waits for a number of seconds.

    Raises:
        DeadlineExceededError: in `before_run`, if the global step does not advance in time.

    Example:
        >>> hook = sg.estimator.GlobalStepWaiterHook(wait_until_step=100)

    Source: TF 2.21 basic_session_run_hooks.py, GlobalStepWaiterHook.
    """

    def __init__(
        self,
        wait_until_step: int,
        *,
        timeout_s: float | None = None,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._wait_until_step = wait_until_step
        self._timeout_s = settings.read("join_timeout_s") if timeout_s is None else timeout_s
        self._clock = clock
        self._sleep = sleep
        self._has_started = False

    def begin(self) -> None:
        """Makes the next run wait again."""
        self._has_started = False

    def before_run(self, run_context: SessionRunContext) -> None:
        """Waits before the first step."""
        if self._has_started:
            return
        self._has_started = True
        step, since_s = run_context.session.global_step, self._clock()
        if step < self._wait_until_step:
            _logger.info("Waiting at global step %d for %d.", step, self._wait_until_step)
        while step < self._wait_until_step:
            self._sleep(_POLL_EVERY_S)
            before, step = step, run_context.session.global_step
            if step != before:
                since_s = self._clock()
            elif self._clock() - since_s >= self._timeout_s:
                raise DeadlineExceededError(
                    explain(
                        f"The global step stayed at {step} for {self._timeout_s:g} s.",
                        expected=f"other workers to advance it to {self._wait_until_step}.",
                        fix="check that the other workers train; or raise timeout_s or "
                        "STRATAGEM_JOIN_TIMEOUT_S.",
                    )
                )


# LoggingTensorHook: periodic logging of step values.


class LoggingTensorHook(SessionRunHook):
    """Logs values every N steps, every N seconds, or at the end.

    Writes to the logger `stratagem.estimator` at level INFO;
    `logging.basicConfig(level="INFO")` shows it.

    Args:
        tensors: a dict from tags to names or model function values; or names, used as tags.
        every_n_iter: steps of this process between log lines; the first step is logged.
        every_n_secs: seconds between log lines.
        at_end: True to also log after the last step. Without an interval, only then.
        formatter: turns the dict of values into a log line.
        clock: returns the time in seconds.

    Attributes:
        tensors: a dict from tags to names or values.

    Raises:
        ValueError: if both intervals are set, neither is set without `at_end`, or `every_n_iter`
            is below 1.

    Example:
        >>> hook = sg.estimator.LoggingTensorHook({"loss": "loss"}, every_n_iter=100)
        >>> hook.tensors
        {'loss': 'loss'}

    Source: TF 2.21 basic_session_run_hooks.py, LoggingTensorHook.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any] | Iterable[str],
        every_n_iter: int | None = None,
        every_n_secs: float | None = None,
        at_end: bool = False,
        formatter: Callable[[dict[str, Any]], str] | None = None,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        has_interval = (every_n_iter is None) != (every_n_secs is None)
        only_at_end = at_end and every_n_iter is None and every_n_secs is None
        if not (has_interval or only_at_end):
            raise ValueError(
                explain(
                    f"LoggingTensorHook received every_n_iter={every_n_iter} and "
                    f"every_n_secs={every_n_secs}.",
                    expected="exactly one of the two, or at_end=True.",
                    fix="pass every_n_iter=100, for example.",
                )
            )
        check_minimum("every_n_iter", every_n_iter, 1)
        if isinstance(tensors, Mapping):
            self.tensors: dict[str, Any] = {tag: tensors[tag] for tag in sorted(tensors)}
        else:
            self.tensors = {name: name for name in tensors}
        self._formatter = formatter
        self._at_end = at_end
        self._timer = (
            NeverTriggerTimer()
            if only_at_end
            else SecondOrStepTimer(every_n_secs, every_n_iter, clock=clock)
        )
        self._num_steps = 0
        self._is_due = False

    def begin(self) -> None:
        """Resets the timer and the step count."""
        self._timer.reset()
        self._num_steps = 0

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Fetches the values when due."""
        self._is_due = self._timer.should_trigger_for_step(self._num_steps)
        return SessionRunArgs(self.tensors) if self._is_due else None

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Logs the fetched values."""
        if self._is_due:
            self._log(run_values.results)
        self._num_steps += 1

    def end(self, session: Session) -> None:
        """Logs the values of the last step if `at_end` is set."""
        if self._at_end:
            self._log(session.run(self.tensors))

    def _log(self, values: dict[str, Any]) -> None:
        elapsed_s, _ = self._timer.update_last_triggered_step(self._num_steps)
        if self._formatter is not None:
            _logger.info("%s", self._formatter(values))
            return
        with np.printoptions(suppress=True):
            line = ", ".join(f"{tag} = {values[tag]}" for tag in self.tensors)
        _logger.info("%s", line if elapsed_s is None else f"{line} ({elapsed_s:.3f} sec)")
