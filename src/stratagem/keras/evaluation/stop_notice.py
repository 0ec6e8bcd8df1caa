"""SIGTERM as a notice to finish the current work."""

from __future__ import annotations

import queue
import signal
import threading
from types import FrameType, TracebackType


class StopNotice:
    """Treats the first SIGTERM as a stop notice; a second one ends the process, as usual.

    Python allows handlers only in the main thread. In other threads, and if the program handles or
    ignores the signal itself, nothing changes and no notice arrives.

    Example:
        >>> import signal
        >>> from stratagem.keras.evaluation.stop_notice import StopNotice
        >>> with StopNotice() as notice:
        ...     signal.raise_signal(signal.SIGTERM)
        ...     notice.is_given
        True
    """

    def __init__(self) -> None:
        # A signal handler interrupts wait(): SimpleQueue.put is reentrant, Event.set is not.
        self._woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_taken = False
        self.is_given = False

    def __enter__(self) -> StopNotice:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._take)
            self._is_taken = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._is_taken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def wait(self, seconds: float) -> None:
        """Waits for the notice, at most `seconds`."""
        try:
            self._woken.get(timeout=seconds)
        except queue.Empty:
            return

    def _take(self, signum: int, frame: FrameType | None) -> None:
        self.is_given = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._woken.put(None)
