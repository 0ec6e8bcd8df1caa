"""What a notice before preemption is, and what all sources of notices have in common."""

from __future__ import annotations

import abc
import dataclasses
import queue
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from stratagem.messages import explain

__all__ = ["AnySource", "Notice", "NoticeSource"]

# A signal that comes just before the main thread begins to wait does not wake it: Python runs the
# handler when that wait is over.
_LONGEST_WAIT_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """Word that this process is going to be ended.

    Args:
        source: what it came from, such as `"SIGTERM"`.
        message: one line for people.
        heard_at_s: when it was heard, by `time.monotonic()`.
        grace_s: at most so many seconds are left from then on; None where the source does not tell.
    """

    source: str
    message: str
    heard_at_s: float
    grace_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        """When the process is ended at the latest, by `time.monotonic()`, if the source tells."""
        return None if self.grace_s is None else self.heard_at_s + self.grace_s


class NoticeSource(abc.ABC):
    """Hears notices in this process, from `start` to `stop`; also a context manager.

    What was heard can be read from every thread, and stays readable after `stop`. A source of one's
    own implements `_listen` and `_end`, and calls `hear`.

    Example:
        >>> import signal
        >>> with sg.preemption.SignalSource(["SIGUSR1"]) as source:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     source.wait(timeout_s=10).source
        'SIGUSR1'
    """

    def __init__(self) -> None:
        # Signal handlers write here, between any two steps of the main thread. So there is no lock,
        # which that thread might hold: appending is one step, and SimpleQueue.put may be called
        # while the same thread is inside of get.
        self._notices: list[Notice] = []
        self._errors: list[Exception] = []
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._followers: list[NoticeSource] = []
        self._was_started = False
        self._listens = False

    def start(self) -> None:
        """Begins to listen.

        Raises:
            RuntimeError: it has been started before, or cannot listen here.
        """
        if self._was_started:
            raise RuntimeError(
                explain(
                    f"This {type(self).__name__} was started before.",
                    expected="a source that listens once: what it has heard stays with it.",
                    fix="make a new one.",
                )
            )
        self._listen()
        self._was_started = self._listens = True

    def stop(self) -> None:
        """Ends listening; without effect where it does not listen."""
        if self._listens:
            self._listens = False
            self._end()

    @property
    def notice(self) -> Notice | None:
        """The first notice that was heard; None before.

        Raises:
            Exception: listening has failed. The error is the one that ended it.
        """
        if self._notices:
            return self._notices[0]
        if self._errors:
            raise self._errors[0]
        return None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """All that were heard, in their order: a later one may leave less time."""
        return tuple(self._notices)

    def wait(self, timeout_s: float) -> Notice | None:
        """Waits for the first notice.

        Args:
            timeout_s: for so long at most.

        Returns:
            The notice; None if there was none in time.

        Raises:
            Exception: as of `notice`.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            left_s = max(0.0, end_s - time.monotonic())
            try:
                self._woken.get(timeout=min(left_s, _LONGEST_WAIT_S))
            except queue.Empty:
                if left_s > _LONGEST_WAIT_S:
                    continue
                return self.notice
            self._woken.put(None)  # for the next one that waits
            return self.notice

    def hear(self, notice: Notice) -> None:
        """Keeps a notice and wakes who waits; for signal handlers and threads alike.

        Args:
            notice: what was heard.
        """
        self._notices.append(notice)
        self._woken.put(None)
        for follower in self._followers:
            follower.hear(notice)

    def fail(self, error: Exception) -> None:
        """Keeps the error that has ended listening, and wakes who waits.

        Args:
            error: raised by `notice` and `wait` from now on, unless there is a notice.
        """
        self._errors.append(error)
        self._woken.put(None)
        for follower in self._followers:
            follower.fail(error)

    def tell(self, follower: NoticeSource) -> None:
        """Lets another source hear all that this one hears from now on.

        Args:
            follower: the other one.
        """
        self._followers.append(follower)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    @abc.abstractmethod
    def _listen(self) -> None:
        """Begins to listen, and returns."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Ends listening."""


class AnySource(NoticeSource):
    """Hears what any of several sources hears; starts and stops them.

    Args:
        sources: those that it listens to, none of them started yet.

    Raises:
        ValueError: none is given.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        super().__init__()
        if not sources:
            raise ValueError(
                explain(
                    "No source of notices is given.",
                    expected="at least one: without any, no notice would ever be heard.",
                    fix="pass SignalSource(), which hears SIGTERM.",
                )
            )
        self._sources = tuple(sources)
        for source in self._sources:
            source.tell(self)

    def _listen(self) -> None:
        started: list[NoticeSource] = []
        try:
            for source in self._sources:
                source.start()
                started.append(source)
        except Exception:
            for source in started:
                source.stop()
            raise

    def _end(self) -> None:
        for source in self._sources:
            source.stop()
