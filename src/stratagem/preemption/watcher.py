"""Tells a program whether it failed because of a preemption."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from stratagem.preemption.configuration import TerminationConfig

__all__ = ["PreemptionWatcher"]


class PreemptionWatcher:
    """Listens for notices to this process from now on, so that a failure can be told from one.

    Args:
        termination_config: what counts as notice; what the environment gives without it.

    Raises:
        RuntimeError: it cannot listen here, as outside the main thread.

    Example:
        >>> import signal
        >>> with sg.PreemptionWatcher() as watcher:
        ...     print(watcher.preemption_message)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(watcher.preemption_message)
        None
        SIGTERM came to process ...

    Source: TF 2.21 preemption_watcher.py, PreemptionWatcher.
    """

    def __init__(self, termination_config: TerminationConfig | None = None) -> None:
        config = termination_config or TerminationConfig()
        self._source = config.for_environment().source()
        self._stopped = threading.Event()
        self._source.start()

    @property
    def preemption_message(self) -> str | None:
        """What the first notice says; None before.

        Raises:
            Exception: listening has failed. The error is the one that ended it.
        """
        notice = self._source.notice
        return None if notice is None else notice.message

    def block_until_worker_exit(self) -> None:
        """Waits until the machine that got notice is gone, and with it the workers on it.

        That is when the earliest time is over that a notice leaves. So a program that has
        failed does not begin again on such a machine. It returns at once without a notice, where
        no notice tells how long there is, and after `stop`.

        Raises:
            Exception: as of `preemption_message`.
        """
        if self._source.notice is None:
            return
        deadlines_s = [notice.deadline_s for notice in self._source.notices]
        known_s = [deadline_s for deadline_s in deadlines_s if deadline_s is not None]
        if known_s:
            self._stopped.wait(max(0.0, min(known_s) - time.monotonic()))

    def stop(self) -> None:
        """Ends listening, and puts back the handlers of signals."""
        self._stopped.set()
        self._source.stop()

    def __enter__(self) -> PreemptionWatcher:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
