"""Signals as notices: SIGTERM from Kubernetes, Slurm and most schedulers, and others by choice."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from stratagem.messages import explain
from stratagem.preemption.notices import Notice, NoticeSource

__all__ = ["SignalSource", "ignore_until_the_end"]

# What schedulers send before they end a job. Some do not exist on every system.
_SELECTABLE = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP", "SIGXCPU")
# How many further signals are only noted: Slurm sends SIGTERM once more at the time limit, and who
# types kill again and again wants the process to end.
_NUM_FURTHER = 1
_PROCESS_STATUS = Path("/proc/self/status")


class SignalSource(NoticeSource):
    """Hears signals to this process.

    The first signal is a notice and does nothing else; the second is a notice too. From the third
    on, what was there before decides, so that `kill` ends a process that does not leave by
    itself. In a forked child what was there before decides at once. `stop` puts it back.
    Python runs handlers in the main thread: where that is inside one long call, such as a compiled
    step, the notice is heard when the call ends. Several sources can listen to one signal.

    Args:
        signals: names or numbers: SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP or SIGXCPU.
        time_left_s: asked with each signal how many seconds are left at most. It must not raise.

    Raises:
        ValueError: no signal, or one that is no notice.

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
        self.signals = tuple(dict.fromkeys(_signal(name) for name in _listed(signals)))
        self._time_left_s = time_left_s
        self._handlers: list[_Handler] = []

    def note(self, signum: signal.Signals) -> None:
        """Makes a notice of a signal; called by the handler.

        Args:
            signum: the signal that has come.
        """
        grace_s = None if self._time_left_s is None else self._time_left_s()
        self.hear(
            Notice(
                source=signum.name,
                message=f"{signum.name} came to process {os.getpid()}.",
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
            handler.leave_if_unused()


def ignore_until_the_end() -> None:
    """Ignores the signals that are still listened to; for when nothing is left to do but to end.

    Python puts the default back while it ends, and that would end the process with another exit
    code than it has chosen.
    """
    for name in _SELECTABLE:
        signum = getattr(signal, name, None)
        handler = None if signum is None else signal.getsignal(signum)
        if signum is not None and isinstance(handler, _Handler) and handler.is_used:
            signal.signal(signum, signal.SIG_IGN)


class _Handler:
    """Takes the place of one signal's handler while sources listen to it."""

    def __init__(self, signum: signal.Signals) -> None:
        self.sources: tuple[SignalSource, ...] = ()
        self._signum = signum
        self._process_id = os.getpid()
        self._num_heard = 0
        self._previous: Any = signal.signal(signum, self)

    @property
    def is_of_this_process(self) -> bool:
        return os.getpid() == self._process_id

    @property
    def is_used(self) -> bool:
        return bool(self.sources) and self.is_of_this_process

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self._num_heard += 1
        patient = self._num_heard <= 1 + _NUM_FURTHER
        # A forked child has nobody who would look at its notices: pools end theirs by SIGTERM.
        if patient and self.is_used:
            for source in self.sources:
                source.note(self._signum)
        elif callable(self._previous):
            self._previous(signum, frame)
        elif self._previous == signal.SIG_DFL:
            signal.signal(self._signum, signal.SIG_DFL)
            signal.raise_signal(self._signum)

    def leave_if_unused(self) -> None:
        """Puts back what was there before; not over a handler that was set since.

        Only the main thread may. Elsewhere it stays, and does what was there before.
        """
        is_main = threading.current_thread() is threading.main_thread()
        if not self.sources and is_main and signal.getsignal(self._signum) is self:
            signal.signal(self._signum, self._previous)


def _listed(signals: Sequence[str | int]) -> list[str | int]:
    # A name alone is a sequence of letters.
    listed: list[str | int] = [signals] if isinstance(signals, str | int) else list(signals)
    if not listed:
        raise ValueError(
            explain(
                "No signal is given to listen to.",
                expected=f"one of {', '.join(_SELECTABLE)}, or several.",
                fix="leave signals out for SIGTERM.",
            )
        )
    return listed


def _signal(name: str | int) -> signal.Signals:
    for selectable in _SELECTABLE:
        signum = getattr(signal, selectable, None)
        if signum is not None and name in (selectable, signum):
            return signum
    raise ValueError(
        explain(
            f"Signal {name!r} cannot be a notice.",
            expected=f"one of {', '.join(_SELECTABLE)}.",
            fix="choose the one that your scheduler sends, such as SIGUSR1.",
        )
    )


def _require_main_thread() -> None:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            explain(
                f"Signals cannot be listened to in thread {threading.current_thread().name!r}.",
                expected="the main thread: Python lets no other one set a handler.",
                fix="start it in the main thread, or pass a termination_watcher_fn.",
            )
        )


def _require_python_handler(signum: signal.Signals) -> None:
    """JAX's preemption service sets one that Python knows nothing of, and cannot put back."""
    if signal.getsignal(signum) is None or _is_caught_unknown_to_python(signum):
        raise RuntimeError(
            explain(
                f"{signum.name} has a handler that was not set from Python.",
                expected="none, or one that Python can put back: only the last one set is called.",
                fix="for JAX's own, set jax_enable_preemption_service to False before "
                "jax.distributed.initialize; or listen to another signal.",
            )
        )


def _is_caught_unknown_to_python(signum: signal.Signals) -> bool:
    """Whether the system calls a handler where Python believes there is none; Linux tells."""
    if signal.getsignal(signum) not in (signal.SIG_DFL, signal.SIG_IGN):
        return False
    try:
        lines = _PROCESS_STATUS.read_text().splitlines()
    except OSError:
        return False
    masks = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")]
    return any(mask >> (signum - 1) & 1 for mask in masks)
