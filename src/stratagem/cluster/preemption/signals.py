"""Signals as preemption notices: SIGTERM by default, others on request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stratagem.cluster.preemption.notices import Notice, NoticeSource
from stratagem.errors import explain, invalid

# Signals that schedulers send before they end a job. Some do not exist on every system.
_SELECTABLE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU")
# Signals that count as notices: Slurm repeats SIGTERM at the time limit. More signals mean that
# the sender wants the process to end now.
_MAX_NOTICES = 2
_PROCESS_STATUS = Path("/proc/self/status")


class SignalSource(NoticeSource):
    """Receives signals to this process as notices.

    The first two signals are notices and have no other effect. Further signals call the previous
    handler, so that `kill` ends a process that does not exit by itself. In a forked child the
    previous handler is called at once. `stop` restores it. Python runs handlers in the main thread:
    during one long call, such as a compiled step, the notice arrives when the call ends. Several
    sources can listen to one signal.

    Args:
        signals: names or numbers: SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP or SIGXCPU.
        time_left_s: called at each signal, returns the seconds left at most. It must not raise.

    Raises:
        ValueError: no signal, or one that cannot be a notice.

    Example:
        >>> sg.preemption.SignalSource(["SIGTERM", "SIGUSR1"]).signals
        (<Signals.SIGTERM: 15>, <Signals.SIGUSR1: 10>)

    Source: TF 2.21 failure_handling.py, _start_watching_for_signal.
    """

    def __init__(
        self,
        signals: Sequence[str | int] = ("SIGTERM",),
        *,
        time_left_s: Callable[[], float] | None = None,
    ) -> None:
        super().__init__()
        self.signals = tuple(dict.fromkeys(_signal(name) for name in _as_list(signals)))
        self._time_left_s = time_left_s
        self._handlers: list[_Handler] = []

    def note(self, signum: signal.Signals) -> None:
        """Records a signal as a notice; called by the handler.

        Args:
            signum: the signal.
        """
        grace_s = None if self._time_left_s is None else self._time_left_s()
        self.hear(
            Notice(
                source=signum.name,
                message=f"{signum.name} was sent to process {os.getpid()}.",
                heard_at_s=time.monotonic(),
                grace_s=grace_s,
            )
        )

    def _listen(self) -> None:
        _require_main_thread()
        for signum in self.signals:
            _require_python_handler(signum)
        for signum in self.signals:
            handler = signal.getsignal(signum)
            if not isinstance(handler, _Handler) or not handler.is_of_this_process:
                handler = _Handler(signum)
            handler.sources = (*handler.sources, self)
            self._handlers.append(handler)

    def _end(self) -> None:
        for handler in self._handlers:
            handler.sources = tuple(source for source in handler.sources if source is not self)
            handler.restore_if_unused()


def ignore_until_exit() -> None:
    """Ignores the signals with listeners until the process exits; call it last before exiting.

    Otherwise a signal during exit would change the exit code: Python restores default handlers.
    """
    for name in _SELECTABLE:
        signum = getattr(signal, name, None)
        handler = None if signum is None else signal.getsignal(signum)
        if signum is not None and isinstance(handler, _Handler) and handler.is_used:
            signal.signal(signum, signal.SIG_IGN)


class _Handler:
    """Handler of one signal, installed while sources listen to it."""

    def __init__(self, signum: signal.Signals) -> None:
        self.sources: tuple[SignalSource, ...] = ()
        self._signum = signum
        self._process_id = os.getpid()
        self._num_received = 0
        self._previous: Any = signal.signal(signum, self)

    @property
    def is_of_this_process(self) -> bool:
        return os.getpid() == self._process_id

    @property
    def is_used(self) -> bool:
        return bool(self.sources) and self.is_of_this_process

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._num_received += 1
        # Nothing reads the notices of a forked child; process pools end theirs with SIGTERM.
        if self._num_received <= _MAX_NOTICES and self.is_used:
            for source in self.sources:
                source.note(self._signum)
        elif callable(self._previous):
            self._previous(signum, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(self._signum, signal.SIG_DFL)
            signal.raise_signal(self._signum)

    def restore_if_unused(self) -> None:
        """Restores the previous handler, if this one is unused and still installed.

        Only the main thread can. Elsewhere this handler stays and calls the previous one.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self.sources and is_main and signal.getsignal(self._signum) is self:
            signal.signal(self._signum, self._previous)


def _as_list(signals: Sequence[str | int]) -> list[str | int]:
    # A single name is a sequence of letters.
    listed: list[str | int] = [signals] if isinstance(signals, str | int) else list(signals)
    if not listed:
        raise invalid(
            "The list of signals is empty.",
            expected=f"one or more of {', '.join(_SELECTABLE)}.",
            fix="omit signals to listen to SIGTERM.",
        )
    return listed


def _signal(name: str | int) -> signal.Signals:
    for selectable in _SELECTABLE:
        signum = getattr(signal, selectable, None)
        if signum is not None and name in (selectable, signum):
            return signum
    raise invalid(
        f"Signal {name!r} cannot be a notice.",
        expected=f"one of {', '.join(_SELECTABLE)}.",
        fix="pass the signal that your scheduler sends, such as SIGUSR1.",
    )


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            explain(
                f"Cannot listen to signals in thread {threading.current_thread().name!r}.",
                expected="the main thread: Python allows no other one to set a handler.",
                fix="start the source in the main thread, or pass a termination_watcher_fn.",
                code="SG708",
            )
        )


def _require_python_handler(signum: signal.Signals) -> None:
    """Raises for a handler not set by Python, such as JAX's, which Python could not restore."""
    if signal.getsignal(signum) is None or has_foreign_handler(signum):
        raise RuntimeError(
            explain(
                f"{signum.name} has a handler that was not set from Python.",
                expected="no handler, or one set by Python, which it can restore later.",
                fix="if it is JAX's, set jax_enable_preemption_service to False before "
                "jax.distributed.initialize; otherwise listen to another signal.",
                code="SG708",
            )
        )


def has_foreign_handler(signum: signal.Signals) -> bool:
    """Returns True if Linux reports a handler of this process that Python does not."""
    if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    try:
        lines = _PROCESS_STATUS.read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (signum - 1) & 1 for mask in masks)
