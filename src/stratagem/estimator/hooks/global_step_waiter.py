"""GlobalStepWaiterHook: delayed start of a worker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from stratagem import config
from stratagem.errors import DeadlineExceededError
from stratagem.estimator.hooks.session_run_hook import SessionRunContext, SessionRunHook
from stratagem.estimator.hooks.timers import Clock
from stratagem.messages import explain

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
        self._timeout_s = config.join_timeout_s() if timeout_s is None else timeout_s
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
