"""Notice source that polls a user's function."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stratagem.cluster.preemption.notices import Notice, NoticeSource
from stratagem.messages import explain


class PolledSource(NoticeSource):
    """Polls a function in a thread until it returns True.

    An error in the function ends polling; `notice` and `wait` raise it.

    Args:
        watcher_fn: returns True for a notice, False otherwise. It should not block.
        interval_s: seconds between two calls.

    Raises:
        ValueError: the interval is not above 0.

    Example:
        >>> with sg.preemption.PolledSource(lambda: True) as source:
        ...     source.wait(timeout_s=10).source
        'termination_watcher_fn'

    Source: TF 2.21 failure_handling.py, _poll_termination_signal.
    """

    def __init__(self, watcher_fn: Callable[[], bool], *, interval_s: float = 1.0) -> None:
        super().__init__()
        if not 0 < interval_s < float("inf"):
            raise ValueError(
                explain(
                    f"interval_s={interval_s!r} is out of range.",
                    expected="a number of seconds above 0.",
                    fix="pass interval_s=1.0, for example.",
                )
            )
        self._watcher_fn = watcher_fn
        self._interval_s = interval_s
        self._stopped = threading.Event()

    def _listen(self) -> None:
        # A daemon, so that a blocking function does not keep the process alive.
        threading.Thread(target=self._poll, name="stratagem-notice-poll", daemon=True).start()

    def _end(self) -> None:
        self._stopped.set()

    def _poll(self) -> None:
        try:
            while not self._has_notice():
                if self._stopped.wait(self._interval_s):
                    return
        except Exception as error:  # noqa: BLE001 - `notice` raises it in the calling thread
            self.fail(error)
            return
        if not self._stopped.is_set():
            self.hear(
                Notice(
                    source="termination_watcher_fn",
                    message="The termination_watcher_fn returned True.",
                    heard_at_s=time.monotonic(),
                )
            )

    def _has_notice(self) -> bool:
        answer = self._watcher_fn()
        if answer not in (True, False):
            raise TypeError(
                explain(
                    f"The termination_watcher_fn returned {answer!r}.",
                    expected="True for a notice, False otherwise.",
                    fix="return a comparison, such as text == 'TRUE'.",
                )
            )
        return bool(answer)
