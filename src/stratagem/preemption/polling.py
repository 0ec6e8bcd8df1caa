"""A function of the user's, asked again and again whether there is notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from stratagem.messages import explain
from stratagem.preemption.notices import Notice, NoticeSource

__all__ = ["PolledSource"]


class PolledSource(NoticeSource):
    """Asks a function in a thread until it says that there is notice.

    An error in the function ends the asking, and comes out of `notice` and `wait`.

    Args:
        watcher_fn: returns True when there is notice, False else. It should not block.
        interval_s: the pause between two calls.

    Raises:
        ValueError: the pause is not above 0.

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
                    f"interval_s={interval_s!r} is no pause.",
                    expected="a number of seconds above 0.",
                    fix="pass 1.0, for example.",
                )
            )
        self._watcher_fn = watcher_fn
        self._interval_s = interval_s
        self._stopped = threading.Event()

    def _listen(self) -> None:
        # A daemon: a function that blocks must not keep the process from ending.
        threading.Thread(target=self._ask, name="stratagem-notice-poll", daemon=True).start()

    def _end(self) -> None:
        self._stopped.set()

    def _ask(self) -> None:
        try:
            while not self._has_notice():
                if self._stopped.wait(self._interval_s):
                    return
        except Exception as error:  # noqa: BLE001 - raised by `notice`, in the thread that looks
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
                    expected="True when there is notice, False else.",
                    fix="return a comparison, such as text == 'TRUE'.",
                )
            )
        return bool(answer)
