"""Arithmetic of XLA's threads in other threads: denormal numbers are zero.

A program that continues in another thread would keep them, and have other bits than in a process
where it continued in one of XLA's.

Source: glibc, fenv.h; XLA, tsl/platform/denormal.cc.
"""

from __future__ import annotations

import ctypes
import platform
import sys

# In C's `fenv_t` on Linux: the place of the control word in units of 32 bits, and its bits.
_CONTROLS = {
    "x86_64": (7, 0x8040),  # MXCSR: results are flushed, and so are arguments
    "aarch64": (0, 1 << 24),  # FPCR: both
}
_Environment = ctypes.c_uint32 * 16  # larger than either


def flush_denormals() -> None:
    """Makes this thread compute as XLA's do, from now on; changes nothing but on Linux."""
    control = _CONTROLS.get(platform.machine()) if sys.platform == "linux" else None
    if control is None:
        return
    place, bits = control
    library, environment = ctypes.CDLL(None), _Environment()
    library.fegetenv(environment)
    environment[place] |= bits
    library.fesetenv(environment)
