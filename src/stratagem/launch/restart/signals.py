"""Signals to the launcher, queued for its loop."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# No task is restarted after one of these.
ENDING = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
_CAUGHT = (*sorted(ENDING), signal.SIGUSR1, signal.SIGUSR2)


class CaughtSignals:
    """Replaces a program's own handlers while its tasks run.

    Only the main thread can have handlers; elsewhere nothing is caught. Signals that this process
    ignores stay ignored, here and in its tasks: `nohup` does that to SIGHUP.
    """

    def __init__(self) -> None:
        self._caught: list[signal.Signals] = []
        self._handlers: dict[signal.Signals, Any] = {}
        self.ending: signal.Signals | None = None

    def __enter__(self) -> CaughtSignals:
        if threading.current_thread() is threading.main_thread():
            for signum in _CAUGHT:
                handler = signal.getsignal(signum)
                # None is a handler set outside Python, which could not be restored.
                if handler not in (None, signal.SIG_IGN):
                    self._handlers[signum] = signal.signal(signum, self._catch)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)

    def take(self) -> list[signal.Signals]:
        """Returns the signals received since the last call, in order."""
        taken: list[signal.Signals] = []
        # One at a time: another may arrive meanwhile.
        while self._caught:
            taken.append(self._caught.pop(0))
        return taken

    def _catch(self, signum: int, frame: FrameType | None) -> None:
        self._caught.append(signal.Signals(signum))
        if signum in ENDING and self.ending is None:
            self.ending = signal.Signals(signum)
