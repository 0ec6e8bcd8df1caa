"""The private names that are used here, and why.

`jaxlib._jax.make_gloo_tcp_collectives`: JAX lets Gloo look up the name of the host to find the
address that other processes are to connect to. Where that name stands for 127.0.1.1, as Debian
writes it into /etc/hosts, or for another network than the one that processes meet in, no other host
can. The function takes an address; JAX has no setting for it (0.10 to 0.12). Without the name, Gloo
looks up the host's name as before. The thread that Gloo starts there is put under SCHED_BATCH. It
wakes when a message comes, takes the core from the thread that computes, finds that one holding the
lock of the connection, and asks again without a pause until its time slice ends, 4 ms later. Under
SCHED_BATCH a thread that wakes takes no core from another. Median of 200 sums of 64 KiB between
two processes on a core each: 4.0 ms, and 0.30 ms so.

`jax._src.compiler._cache_write`, `jax._src.compilation_cache.put_executable_and_time`: JAX writes
its cache of compiled programs from process 0 alone, so that thousands of hosts do not write to one
bucket at a time. But the programs of a process are its own, and no other finds them there (0.10 to
0.12). On one machine each process may write.

`sys._current_frames`: which code a thread is in; Python documents it, for use by specialists.

`os._exit`: ends the process at once. Python documents it too.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Generator
from typing import Any, NoReturn

__all__ = ["cache_programs", "end_at_once", "file_of_main_thread", "gloo_at"]

_MAKER = "make_gloo_tcp_collectives"
_WRITER, _PUT = "_cache_write", "put_executable_and_time"


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

    def make(*args: Any, **kwargs: Any) -> Any:
        with _starting_patient_threads():
            return original(*args, hostname=address, **kwargs)

    setattr(library, _MAKER, make)
    try:
        yield
    finally:
        setattr(library, _MAKER, original)


@contextlib.contextmanager
def _starting_patient_threads() -> Generator[None]:
    """Threads that are started meanwhile take no core from another when they wake: Linux only."""
    if not hasattr(os, "SCHED_BATCH") or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def cache_programs() -> None:
    """Lets a process other than process 0 write what it compiles into JAX's cache on disk."""
    try:
        compiler: Any = importlib.import_module("jax._src.compiler")
        put: Any = getattr(importlib.import_module("jax._src.compilation_cache"), _PUT)
        original = getattr(compiler, _WRITER)
    except (ImportError, AttributeError):
        return

    def write(
        cache_key: str,
        compile_time_s: float,
        module_name: str,
        backend: Any,
        executable: Any,
        *host_callbacks: Any,
    ) -> None:
        original(cache_key, compile_time_s, module_name, backend, executable, *host_callbacks)
        # A program that calls back into Python holds addresses of this process.
        if not any(host_callbacks):
            with contextlib.suppress(Exception):  # without the cache everything works, later
                put(cache_key, module_name, executable, backend, int(compile_time_s))

    setattr(compiler, _WRITER, write)


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
