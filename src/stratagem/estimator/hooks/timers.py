"""When a hook is due: after so many steps, or after so much time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from stratagem.collectives import host
from stratagem.group import current_group
from stratagem.messages import explain

__all__ = ["AgreedTimer", "Clock", "NeverTriggerTimer", "SecondOrStepTimer", "Timer"]

Clock = Callable[[], float]

# Processes that agree on the time wait for each other: about so often, and after so many steps at
# the latest.
_AGREE_EVERY_S = 1.0
_MOST_STEPS_BETWEEN = 1000


class Timer(Protocol):
    """What hooks ask whether they are due."""

    def reset(self) -> None:
        """Forgets when it was triggered."""
        ...

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether to trigger at a step.

        Args:
            step: its number.
        """
        ...

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Notes that it was triggered.

        Args:
            step: the number of the step.

        Returns:
            Seconds and steps since it was triggered before; None the first time.
        """
        ...

    def last_triggered_step(self) -> int | None:
        """Returns the step that it was triggered at last; None if never."""
        ...


class SecondOrStepTimer:
    """A timer that triggers at the first step, and then every N seconds or every N steps.

    Args:
        every_secs: seconds in between.
        every_steps: steps in between.
        clock: tells the time in seconds.

    Raises:
        ValueError: neither is given, or both are; or one is below 0.

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
                    f"A timer got every_secs={every_secs} and every_steps={every_steps}.",
                    expected="one of the two, seconds or steps.",
                    fix="leave one out.",
                )
            )
        if (every_secs or every_steps or 0) < 0:
            raise ValueError(
                explain(
                    f"A timer got a negative interval: every_secs={every_secs}, "
                    f"every_steps={every_steps}.",
                    expected="a number of at least 0.",
                    fix="correct the number.",
                )
            )
        self._every_secs = every_secs
        self._every_steps = every_steps
        self._clock = clock
        self.reset()

    def reset(self) -> None:
        """Forgets when it was triggered: the next step triggers."""
        self._last_step: int | None = None
        self._last_time_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether to trigger at a step.

        Args:
            step: its number.

        Returns:
            True where it never was, or the interval is over; False at the step where it was.
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
        """Notes that it was triggered.

        Args:
            step: the number of the step.

        Returns:
            Seconds and steps since it was triggered before; None the first time.
        """
        now_s, elapsed = self._clock(), (None, None)
        if self._last_step is not None:
            elapsed = now_s - self._last_time_s, step - self._last_step
        self._last_time_s, self._last_step = now_s, step
        return elapsed

    def last_triggered_step(self) -> int | None:
        """Returns the step that it was triggered at last.

        Returns:
            Its number; None if it never was.
        """
        return self._last_step


class AgreedTimer(SecondOrStepTimer):
    """A timer that triggers at the same step on all processes that train in lockstep.

    For what all of them do together, and so ask with the same steps. Of seconds those of the first
    process count; it also says at which step all ask it again, so that they do not wait for each
    other after every step.
    """

    def reset(self) -> None:
        """Forgets when it was triggered: the next step triggers."""
        super().reset()
        self._asked_step: int | None = None
        self._asked_at_s = 0.0
        self._next_step = 0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether to trigger at a step. On every process.

        Args:
            step: its number.

        Returns:
            The same on all.
        """
        is_due = super().should_trigger_for_step(step)
        if self._every_steps is not None or current_group() is None:
            return is_due
        if step < self._next_step:
            return False
        own = {"is_due": is_due, "steps": self._steps_until_next(step)}
        told = host.broadcast_object(own, name="whether a hook is due")
        self._next_step = step + told["steps"]
        return told["is_due"]

    def _steps_until_next(self, step: int) -> int:
        now_s, before, steps = self._clock(), self._asked_at_s, 1
        if self._asked_step is not None and now_s > before:
            steps = int((step - self._asked_step) * _AGREE_EVERY_S / (now_s - before))
        self._asked_step, self._asked_at_s = step, now_s
        return min(max(steps, 1), _MOST_STEPS_BETWEEN)


class NeverTriggerTimer:
    """A timer that never triggers.

    Source: TF 2.21 basic_session_run_hooks.py, NeverTriggerTimer.
    """

    def reset(self) -> None:
        """There is nothing to forget."""

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns False.

        Args:
            step: any.
        """
        del step
        return False

    def update_last_triggered_step(self, step: int) -> tuple[None, None]:
        """Returns that nothing is known.

        Args:
            step: any.
        """
        del step
        return None, None

    def last_triggered_step(self) -> None:
        """Returns None."""
