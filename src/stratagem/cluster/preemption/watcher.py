"""Watcher that distinguishes a preemption from an ordinary failure."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from stratagem.cluster.preemption.configuration import TerminationConfig


class PreemptionWatcher:
    """Listens for notices to this process, to find out whether a failure is due to preemption.

    Args:
        termination_config: what counts as notice; None for the defaults of the environment.

    Raises:
        RuntimeError: signals cannot be handled here, for example outside the main thread.

    Example:
        >>> import signal
        >>> with sg.PreemptionWatcher() as watcher:
        ...     print(watcher.preemption_message)
        ...     signal.raise_signal(signal.SIGTERM)
        ...     print(watcher.preemption_message)
        None
        SIGTERM was sent to process ...

    Source: TF 2.21 preemption_watcher.py, PreemptionWatcher.
    """

    def __init__(self, termination_config: TerminationConfig | None = None) -> None:
        config = termination_config or TerminationConfig()
        self._source = config.for_environment().source()
        self._stopped = threading.Event()
        self._source.start()

    @property
    def preemption_message(self) -> str | None:
        """Message of the first notice, or None if there is none yet.

        Raises:
            Exception: listening failed with this error.
        """
        notice = self._source.notice
        return None if notice is None else notice.message

    def block_until_worker_exit(self) -> None:
        """Waits until the preempted machine is gone, so that training does not restart on it.

        This is the earliest deadline of all notices. Returns at once without a notice, if no notice
        has a deadline, and after `stop`.

        Raises:
            Exception: listening failed with this error.
        """
        if self._source.notice is None:
            return
        deadlines_s = [notice.deadline_s for notice in self._source.notices]
        known_s = [deadline_s for deadline_s in deadlines_s if deadline_s is not None]
        if known_s:
            self._stopped.wait(max(0.0, min(known_s) - time.monotonic()))

    def stop(self) -> None:
        """Stops listening and restores the signal handlers."""
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
