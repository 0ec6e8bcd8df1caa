"""Preemption notices, and the base class of their sources."""

from __future__ import annotations

import abc
import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from stratagem.errors import explain, invalid

# A signal just before the main thread begins to wait does not wake it: Python runs the handler
# only after that wait.
_LONGEST_WAIT_S = 0.2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Notice:
    """A notice that this process will be ended.

    Args:
        source: source of the notice, such as `"SIGTERM"`.
        message: one line for people.
        heard_at_s: time of arrival, on the clock of `time.monotonic()`.
        grace_s: seconds left after arrival, at most; None if the source does not say.

    Example:
        >>> notice = sg.preemption.Notice(
        ...     source="SIGTERM", message="The pod is evicted.", heard_at_s=100.0, grace_s=30.0)
        >>> notice.deadline_s
        130.0

    Source: specific to Stratagem.
    """

    source: str
    message: str
    heard_at_s: float
    grace_s: float | None = None

    @property
    def deadline_s(self) -> float | None:
        """Latest time at which the process is ended, by `time.monotonic()`; None if unknown."""
        return None if self.grace_s is None else self.heard_at_s + self.grace_s


class NoticeSource(abc.ABC):
    """A source of notices to this process, active from `start` to `stop`; also a context manager.

    Every thread may read the notices, also after `stop`. Subclasses implement `_listen` and `_end`,
    and call `hear`.

    Example:
        >>> import signal
        >>> with sg.preemption.SignalSource(["SIGUSR1"]) as source:
        ...     signal.raise_signal(signal.SIGUSR1)
        ...     source.wait(timeout_s=10).source
        'SIGUSR1'

    Source: specific to Stratagem.
    """

    def __init__(self) -> None:
        # Signal handlers write here, between any two bytecodes of the main thread, which may hold
        # any lock. So there is none: appending is atomic, and SimpleQueue.put is reentrant.
        self._notices: list[Notice] = []
        self._errors: list[tuple[Exception, TracebackType | None]] = []
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._followers: list[NoticeSource] = []
        self._was_started = False
        self._is_listening = False

    def start(self) -> None:
        """Starts listening.

        Raises:
            RuntimeError: it was started before, or cannot listen here.
        """
        if self._was_started:
            raise RuntimeError(
                explain(
                    f"This {type(self).__name__} was already started.",
                    expected="a new source: one that was started keeps its notices.",
                    fix="create another source.",
                )
            )
        self._listen()
        self._was_started = self._is_listening = True

    def stop(self) -> None:
        """Stops listening, if it does."""
        if self._is_listening:
            self._is_listening = False
            self._end()

    @property
    def notice(self) -> Notice | None:
        """First notice, or None if there is none yet.

        Raises:
            Exception: listening failed with this error.
        """
        if self._notices:
            return self._notices[0]
        if self._errors:
            error, trace = self._errors[0]
            raise error.with_traceback(trace)  # raised by each call: without earlier frames
        return None

    @property
    def notices(self) -> tuple[Notice, ...]:
        """All notices, in order of arrival; a later one may leave less time."""
        return tuple(self._notices)

    def wait(self, timeout_s: float) -> Notice | None:
        """Waits for the first notice.

        Args:
            timeout_s: seconds to wait at most.

        Returns:
            The notice, or None if there was none in time.

        Raises:
            Exception: listening failed with this error.
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
            self._woken.put(None)  # for the next waiting thread
            return self.notice

    def hear(self, notice: Notice) -> None:
        """Records a notice and wakes waiting threads; safe in signal handlers.

        Args:
            notice: the notice.
        """
        self._notices.append(notice)
        self._woken.put(None)
        for follower in self._followers:
            follower.hear(notice)

    def fail(self, error: Exception) -> None:
        """Records the error that ended listening and wakes waiting threads.

        Args:
            error: raised by `notice` and `wait` from now on, unless there is a notice.
        """
        self._errors.append((error, error.__traceback__))
        self._woken.put(None)
        for follower in self._followers:
            follower.fail(error)

    def tell(self, follower: NoticeSource) -> None:
        """Forwards all future notices and errors to another source.

        Args:
            follower: the other source.
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
        """Starts listening, and returns."""

    @abc.abstractmethod
    def _end(self) -> None:
        """Stops listening."""


class WatchingSource(NoticeSource):
    """A source that watches in threads until it is stopped; an error ends watching."""

    def __init__(self) -> None:
        super().__init__()
        self._stopped = threading.Event()

    def _end(self) -> None:
        self._stopped.set()

    def _begin(self, watch: Callable[[], None], name: str) -> None:
        def run() -> None:
            try:
                watch()
            except Exception as error:  # noqa: BLE001 - `notice` raises it in the calling thread
                self.fail(error)

        # A daemon, so that a blocking function does not keep the process alive.
        threading.Thread(target=run, name=f"stratagem-notice-{name}", daemon=True).start()

    def _hear_now(self, source: str, message: str, grace_s: float | None = None) -> None:
        """Records a notice, unless it comes after the end."""
        if not self._stopped.is_set():
            now_s = time.monotonic()
            self.hear(Notice(source=source, message=message, heard_at_s=now_s, grace_s=grace_s))


class AnySource(NoticeSource):
    """Combines several sources: starts and stops them, and receives all their notices.

    Args:
        sources: one or more, not started yet.

    Raises:
        ValueError: no sources.
    """

    def __init__(self, sources: Sequence[NoticeSource]) -> None:
        super().__init__()
        if not sources:
            raise invalid(
                "The list of notice sources is empty.",
                expected="at least one source; without one, no notice would be received.",
                fix="pass SignalSource(), which receives SIGTERM.",
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
