"""The private names that are used here, and why.

`jaxlib._jax.make_gloo_tcp_collectives`: JAX lets Gloo look up the name of the host to find the
address that other processes are to connect to. Where that name stands for 127.0.1.1, as Debian
writes it into /etc/hosts, or for another network than the one that processes meet in, no other host
can. The function takes an address; JAX has no setting for it (0.10 to 0.12). Without the name, Gloo
looks up the host's name as before.

`sys._current_frames`: which code a thread is in; Python documents it, for use by specialists.

`os._exit`: ends the process at once. Python documents it too.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import threading
from collections.abc import Generator
from typing import Any, NoReturn

__all__ = ["end_at_once", "file_of_main_thread", "gloo_at"]

_MAKER = "make_gloo_tcp_collectives"


@contextlib.contextmanager
def gloo_at(address: str) -> Generator[None]:
    """Lets Gloo listen at an address while JAX's CPU backend starts.

    Args:
        address: of this host, by which the other processes reach it.
    """
    try:
        library: Any = importlib.import_module("jaxlib._jax")
        original = getattr(library, _MAKER)
    except (ImportError, AttributeError):
        yield
        return
    setattr(library, _MAKER, functools.partial(original, hostname=address))
    try:
        yield
    finally:
        setattr(library, _MAKER, original)


def file_of_main_thread() -> str:
    """Returns the file of the code that the main thread is in; empty where it has ended."""
    frames: Any = vars(sys)["_current_frames"]()
    frame = frames.get(threading.main_thread().ident)
    return "" if frame is None else str(frame.f_code.co_filename)


def end_at_once(exit_code: int) -> NoReturn:
    """Ends the process, whatever its threads do; nothing is written out or cleaned up.

    Args:
        exit_code: what the process that started this one sees.
    """
    os._exit(exit_code)
