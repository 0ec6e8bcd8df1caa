"""Pause of Python's cyclic garbage collection while a step is traced and compiled.

A trace allocates objects that all stay until it ends. The collector would walk through them again
and again: a tenth of the time of a large model's first step.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

_lock = threading.Lock()
_num_pauses = 0


@contextlib.contextmanager
def paused_garbage_collection() -> Generator[None]:
    """Pauses garbage collection within the block, unless the program has turned it off itself."""
    global _num_pauses
    with _lock:
        is_first = _num_pauses == 0
        is_ours = gc.isenabled() or not is_first
        if is_ours:
            gc.disable()
            _num_pauses += 1
    try:
        yield
    finally:
        if is_ours:
            with _lock:
                _num_pauses -= 1
                if _num_pauses == 0:
                    gc.enable()
