"""Memory of a process and its children, against allocations of a known size."""

from __future__ import annotations

import mmap
import subprocess
import sys

from benchmarks.workers.peak_memory import PeakMemory, memory_bytes

_SIZE_BYTES = 2**26


def test_peak_covers_memory_that_is_freed_again() -> None:
    before_bytes = memory_bytes()
    with PeakMemory() as peak:
        memory = mmap.mmap(-1, _SIZE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(bytes(_SIZE_BYTES))
        while peak.bytes < before_bytes + _SIZE_BYTES:
            pass
        memory.close()
    assert peak.bytes < before_bytes + 3 * _SIZE_BYTES


def test_children_count() -> None:
    before_bytes = memory_bytes()
    program = f"memory = bytearray(b'1') * {_SIZE_BYTES}; print(flush=True); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    child.stdout.readline()
    assert memory_bytes() >= before_bytes + _SIZE_BYTES
    child.communicate(b"\n")
