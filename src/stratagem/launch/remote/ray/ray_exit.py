"""End of a program that has loaded Ray: by Ctrl-C, or after Ray was lost."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from stratagem.exit_codes import FAILURE
from stratagem.observe.run_events.process_writer import close_events


class _RayConnection:
    is_lost = False


def is_ray_lost() -> bool:
    """Returns True once a process of Ray that this one depends on was lost."""
    return _RayConnection.is_lost


def mark_ray_lost() -> None:
    """Lets this program end without asking Ray, which would wait for a minute and then abort.

    After an uncaught error it ends without the destructors of Ray's library, too: they may crash.
    """
    _RayConnection.is_lost = True
    ray: Any = sys.modules.get("ray")
    if ray is not None:
        atexit.unregister(ray.shutdown)


def print_without_lost_ray(print_error: Callable[..., None]) -> None:
    """Uses `print_error` for uncaught errors once Ray is lost. Call after Ray is imported.

    Ray's own `sys.excepthook` sends an error to the GCS before it prints it, and would not return.
    """
    of_ray = sys.excepthook

    def report(*error: Any) -> None:
        (print_error if _RayConnection.is_lost else of_ray)(*error)

    sys.excepthook = report


@functools.cache
def keep_interrupts() -> None:
    """Lets an interrupted program end by SIGINT, exit code 130. Call before Ray is imported.

    Python notes that a KeyboardInterrupt ended the program, and forgets it if code that runs at the
    exit calls `exec`, as dataclasses do. Ray imports some then, and the exit code would be 1.
    """
    atexit.register(_end)  # handlers run in reverse order: after Ray's


def _end() -> None:
    kind = getattr(sys, "last_type", None)
    if kind is not None and _RayConnection.is_lost:
        _end_now()
    if kind is not None and issubclass(kind, KeyboardInterrupt):
        with contextlib.suppress(KeyboardInterrupt):
            exec("raise KeyboardInterrupt")  # noqa: S102 - a constant


def _end_now() -> NoReturn:
    for child in multiprocessing.active_children():
        child.terminate()
    close_events(FAILURE)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(FAILURE)
