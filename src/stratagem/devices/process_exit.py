"""Exit of a process of a group: together with the others, or immediately if the group is broken.

After another process is lost, a JAX program may never finish, and the interpreter would wait for
XLA's threads forever. So a process of a broken group flushes Python's buffers and exits by itself.
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
from typing import Any, NoReturn

import jax

from stratagem.cluster.preemption.signals import ignore_until_exit
from stratagem.devices.private import exit_now, main_thread_file
from stratagem.errors import INTERRUPTED
from stratagem.group.current import current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.member import Group
from stratagem.observe.run_events.process_writer import close_events, current_events

SHUTDOWN_S = 10
# Time that the program may be stuck inside JAX after its group broke; nothing can interrupt it.
_GRACE_S = 5.0
# The same for a program that has caught the error and continues.
_REPORTED_GRACE_S = 30.0
_POLL_INTERVAL_S = 0.25
_DRAIN_S = 2.0


class _ExitState:
    """Exit code after an error, the planned exit code, and whether the loss was recorded."""

    exit_code: int | None = None
    planned_code: int = 0
    has_recorded_loss: bool = False


_state = _ExitState()


def watch(group: Group) -> None:
    """Handles the exit of this process from now on."""
    previous = sys.excepthook

    def report(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        _state.exit_code = INTERRUPTED if kind is KeyboardInterrupt else 1
        if group.verdict is None:
            group.report_error("".join(traceback.format_exception(kind, error, trace)))
        previous(kind, error, trace)

    sys.excepthook = report
    thread = threading.Thread(
        target=_exit_if_stuck, args=(group,), name="stratagem-exit", daemon=True
    )
    thread.start()


def expect_exit(code: object) -> None:
    """Records the code of the program's `SystemExit`, in case another process is lost then."""
    _state.planned_code = code if isinstance(code, int) else int(code is not None)


def _exit_if_stuck(group: Group) -> None:
    """Exits the process if its main thread is stuck inside JAX after the group broke."""
    group.wait_for_verdict()
    _record_loss(group)
    waited_s = 0.0
    pause = threading.Event()
    while waited_s < (_REPORTED_GRACE_S if group.is_reported else _GRACE_S):
        pause.wait(_POLL_INTERVAL_S)
        is_stuck = _is_in_jax() and (group.waits_in_vain or not group.is_reported)
        waited_s = waited_s + _POLL_INTERVAL_S if is_stuck else 0.0
    faulthandler.dump_traceback()
    _print_verdict(group)
    print(
        f"{group.identity.label} is stuck inside JAX, which cannot be interrupted, and exits now.",
        file=sys.stderr,
        flush=True,
    )
    _exit(1)


def _print_verdict(group: Group) -> None:
    assert group.verdict is not None
    print("".join(traceback.format_exception_only(group.verdict.exception())), file=sys.stderr)


def _record_loss(group: Group) -> None:
    """Records the loss as soon as it is known, since this process may not exit normally."""
    events, verdict = current_events(), group.verdict
    if events is None or verdict is None or _state.has_recorded_loss:
        return
    _state.has_recorded_loss = True
    lost = None if verdict.lost is None else verdict.lost.partition(" (")[0]
    events.failure(verdict.message, lost=lost, silence_s=verdict.silent_s)


def _is_in_jax() -> bool:
    """Returns True if the main thread is in JAX, or in our code: C++ calls have no Python frame."""
    packages = [os.path.dirname(jax.__file__), str(Path(__file__).parents[1])]
    return main_thread_file().startswith(tuple(path + os.sep for path in packages))


@atexit.register
def _exit_with_group() -> None:
    group: Any = current_group()
    if isinstance(group, ElasticGroup):
        group.close()
    elif group is not None:
        _leave_group(group)
    ignore_until_exit()


def _leave_group(group: Group) -> None:
    if _state.exit_code is None and group.verdict is None and group.leave():
        with contextlib.suppress(Exception):  # another process may exit first
            if group.process_id:
                jax.distributed.shutdown()
            group.exchange("the end of all", None, timeout_s=SHUTDOWN_S)
        return
    _record_loss(group)
    group.drain(_DRAIN_S)
    verdict = group.verdict
    # This program has ended well, but its processes did not do the same.
    if verdict is not None and verdict.error == "RuntimeError" and not group.is_reported:
        _print_verdict(group)
        _exit(_state.exit_code or 1)
    # The program ended by itself while others still waited for it.
    planned = 1 if group.is_reported else _state.planned_code
    _exit(planned if _state.exit_code is None else _state.exit_code)


def _exit(exit_code: int) -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    close_events(exit_code)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    exit_now(exit_code)
