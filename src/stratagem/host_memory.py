"""Freed memory of this process, which stays with it for the next step on CPU devices.

XLA:CPU allocates a program's buffers with malloc in each call and frees them after it. By default
glibc gives large blocks back to the system, which then has to clear each page again: more than a
third of the CPU time of a convolutional network.

Source: mallopt(3).
"""

from __future__ import annotations

import ctypes
import os
import sys

from stratagem import environment

__all__ = ["keep_freed_memory"]

# Constants of glibc's malloc.h, and their values.
_PARAMETERS = {
    -8: 1,  # M_ARENA_MAX: further arenas, for threads, cannot hold blocks of more than 64 MiB
    -4: 0,  # M_MMAP_MAX: larger blocks have no mapping of their own
    -1: -1,  # M_TRIM_THRESHOLD: never give memory back
    -2: 2**26,  # M_TOP_PAD: memory is requested in large steps
}
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
_CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_")


def keep_freed_memory() -> bool:
    """Makes malloc keep freed memory if this process trains on CPU; returns True if it does.

    Call before JAX starts its backend, whose threads would get arenas of their own. Does nothing
    without glibc, on a host with accelerators, or if the user configured malloc.
    """
    if not environment.read("keep_freed_memory") or not _is_for_cpu():
        return False
    if any(name.startswith(_CHOSEN_BY_USER) for name in environment.snapshot()):
        return False
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(*one) for one in _PARAMETERS.items())


def _is_for_cpu() -> bool:
    platforms = environment.lookup("JAX_PLATFORMS")
    if platforms is not None:
        return platforms.split(",")[0] == "cpu"
    return not any(map(os.path.exists, _ACCELERATORS))
