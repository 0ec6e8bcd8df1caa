"""Memory of this process on CPU devices: what a step frees stays for the next one, in large pages.

XLA:CPU allocates a program's buffers with malloc in each call and frees them after it. By default
glibc gives large blocks back to the system, which then has to clear each page again: more than a
third of the CPU time of a convolutional network. Pages of 2 MiB save another tenth.

Source: mallopt(3), madvise(2).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from typing import Any

from stratagem import environment

# Constants of glibc's malloc.h, and their values.
_PARAMETERS = {
    -8: 1,  # M_ARENA_MAX: further arenas, for threads, cannot hold blocks of more than 64 MiB
    -4: 0,  # M_MMAP_MAX: larger blocks have no mapping of their own
    -1: -1,  # M_TRIM_THRESHOLD: never give memory back
    -2: 2**26,  # M_TOP_PAD: memory is requested in large steps
}
# Part of the machine's memory for which large pages are requested, and their size.
_LARGE_PART, _LARGE_BYTES = 4, 2**21
_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd", "/dev/accel0", "/dev/vfio/0")
_CHOSEN_BY_USER = ("GLIBC_TUNABLES", "MALLOC_")

_is_kept = False


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
    library: Any = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):
        return False
    global _is_kept
    are_set = [library.mallopt(*one) for one in _PARAMETERS.items()]
    _is_kept = all(are_set)
    if _is_kept:
        _request_large_pages(library)
    return _is_kept


def release_freed_memory() -> None:
    """Returns freed memory to the system, where glibc can: the next steps get it page by page.

    Call after work that is not repeated and frees much, such as a restore.
    """
    library: Any = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(ctypes.c_size_t(0))
        if _is_kept:  # the end of the heap is gone, and its large pages with it
            _request_large_pages(library)


def _request_large_pages(library: Any) -> None:
    """Extends the heap, which uses no memory yet, and requests large pages for it."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    size = page_bytes * os.sysconf("SC_PHYS_PAGES") // _LARGE_PART
    library.malloc.restype = ctypes.c_void_p
    begin = library.malloc(ctypes.c_size_t(size))
    if begin is None:  # a limit of the address space
        return
    library.free(ctypes.c_void_p(begin))
    first = -(-begin // _LARGE_BYTES) * _LARGE_BYTES
    length = (begin + size - first) // page_bytes * page_bytes
    library.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def _is_for_cpu() -> bool:
    platforms = environment.lookup("JAX_PLATFORMS")
    if platforms is not None:
        return platforms.split(",")[0] == "cpu"
    return not any(map(os.path.exists, _ACCELERATORS))
