"""The kernel keeps the limit, for each process that is started under it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from examples.clicks.memory import can_make

_UNDER_LIMIT = """
from examples.clicks.memory import can_make, limit_memory, used_by
limit_memory(600_000_000)
print(can_make(1_000_000, 200), can_make(1_000_000, 50), used_by("it").limit_bytes)
import numpy
numpy.ones((1_000_000, 200), numpy.float32)
"""


_MAKES_AND_FORGETS = """
import numpy
from examples.clicks.memory import used_by
print(used_by("it").peak_bytes)
made = numpy.ones(25_000_000)
print(used_by("it").peak_bytes)
del made
print(used_by("it").peak_bytes)
"""


def _run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_table_that_is_larger_than_the_limit_cannot_be_made() -> None:
    finished = _run(_UNDER_LIMIT)
    assert finished.stdout.split() == ["False", "True", "600000000"]
    assert finished.returncode == 1
    assert "MemoryError" in finished.stderr


def test_process_that_ends_in_another_way_is_reported() -> None:
    with pytest.raises(RuntimeError, match="negative dimensions"):
        can_make(-1, 3)


def test_peak_is_what_was_once_resident() -> None:
    before, during, after = map(int, _run(_MAKES_AND_FORGETS).stdout.split())
    assert before + 150_000_000 < during < before + 250_000_000
    assert during - 2**20 < after < during + 2**20  # the kernel counts some pages late
