"""How a process of a group ends: together with the others, or at once when the group is broken.

After a loss a program of JAX may never end, and with it the interpreter would never: threads of XLA
wait for a process that is gone. So a broken group ends its processes itself, after everything of
Python's own was written out.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from stratagem.goodput import close_events, current_events
from stratagem.group import Group, current_group
from stratagem.preemption.signals import ignore_until_exit
from stratagem.topology.private import end_at_once, file_of_main_thread

__all__ = ["SHUTDOWN_S", "expect_exit", "watch"]

SHUTDOWN_S = 10
# How long the program may sit inside JAX after its group broke: nothing can wake it there.
_GRACE_S = 5.0
_LOOK_S = 0.25
_DRAIN_S = 2.0
_INTERRUPTED = 130  # as shells tell it


class _State:
    """How this process ends: by an error of its own, or as planned; and what it has told."""

    exit_code: int | None = None
    planned_code: int = 0
    has_told_events: bool = False


_state = _State()


def watch(group: Group) -> None:
    """Looks after the end of a process from now on.

    Args:
        group: that it belongs to.
    """
    previous = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _state.exit_code = _INTERRUPTED if kind is KeyboardInterrupt else 1
        if group.verdict is None:
            group.report_error("".join(traceback.format_exception(kind, error, trace)))
        previous(kind, error, trace)

    sys.excepthook = tell
    thread = threading.Thread(
        target=_end_what_cannot_wake, args=(group,), name="stratagem-ending", daemon=True
    )
    thread.start()


def expect_exit(code: object) -> None:
    """Notes how the program is about to end: that counts also where another process is lost then.

    Args:
        code: of its `SystemExit`.
    """
    _state.planned_code = code if isinstance(code, int) else int(code is not None)


def _end_what_cannot_wake(group: Group) -> None:
    """Ends the process if its main thread waits inside JAX for what will never come."""
    group.wait_for_verdict()
    _tell_events(group)
    waited_s = 0.0
    pause = threading.Event()
    while waited_s < _GRACE_S:
        pause.wait(_LOOK_S)
        waited_s = waited_s + _LOOK_S if _waits_in_jax() and not group.is_reported else 0.0
        if group.is_reported:
            return
    assert group.verdict is not None
    faulthandler.dump_traceback()
    error = group.verdict.exception()
    print(f"{type(error).__module__}.{type(error).__qualname__}: {error}", file=sys.stderr)
    print(
        f"{group.identity.label} is inside JAX, where nothing can be raised, and ends now.",
        file=sys.stderr,
        flush=True,
    )
    _end(1)


def _tell_events(group: Group) -> None:
    """Writes who was lost, as soon as it is known: this process may not come to its end."""
    events, verdict = current_events(), group.verdict
    if events is None or verdict is None or _state.has_told_events:
        return
    _state.has_told_events = True
    lost = None if verdict.lost is None else verdict.lost.partition(" (")[0]
    events.failure(verdict.message, lost=lost, silence_s=verdict.silent_s)


def _waits_in_jax() -> bool:
    """Also where our own code is the last of Python's: what it calls has no frame."""
    packages = [os.path.dirname(jax.__file__), str(Path(__file__).parents[1])]
    return file_of_main_thread().startswith(tuple(path + os.sep for path in packages))


@atexit.register
def _leave() -> None:
    group = current_group()
    if group is not None:
        _leave_group(group)
    ignore_until_exit()


def _leave_group(group: Group) -> None:
    if _state.exit_code is None and group.verdict is None and group.leave():
        with contextlib.suppress(Exception):  # that another one is in a hurry harms nobody
            if group.process_id:
                jax.distributed.shutdown()
            group.exchange("the end of all", None, timeout_s=SHUTDOWN_S)
        return
    _tell_events(group)
    group.drain(_DRAIN_S)
    # Of a program that ended by itself while others still waited for it nothing else is known.
    planned = 1 if group.is_reported else _state.planned_code
    _end(planned if _state.exit_code is None else _state.exit_code)


def _end(exit_code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    close_events(exit_code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    end_at_once(exit_code)
