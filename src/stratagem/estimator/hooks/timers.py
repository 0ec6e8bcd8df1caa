"""Timers that trigger hooks after a number of steps or seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

from stratagem.devices.collectives import host
from stratagem.group.current import current_group
from stratagem.messages import explain

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
