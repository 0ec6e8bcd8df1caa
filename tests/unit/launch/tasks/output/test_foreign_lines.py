"""Log lines of JAX's libraries that are left out, and lines that only look like them."""

from __future__ import annotations

import pytest

from stratagem.launch.tasks.output.task_output import is_foreign

SERVICE = (
    "W0102 03:04:05.678901    1234 coordination_service.cc:711] "
    "Job: jax. Using experimental recoverable task feature. More text."
)


@pytest.mark.parametrize(
    "line",
    [
        SERVICE,
        "[Gloo] Rank 3 is connected to 7 peer ranks. Expected",
        # Two threads at once.
        "[Gloo] Rank [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of connected",
        "1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
    ],
)
def test_line_of_a_library_is_foreign(line) -> None:
    assert is_foreign(line)


@pytest.mark.parametrize(
    "line",
    [
        "",
        f"my script prints: {SERVICE}",
        SERVICE.replace("W0102", "E0102"),
        SERVICE.replace("experimental", "stable"),
        "[Gloo] Rank 3 is connected to no peer ranks.",
        "[Gloo] connection of rank 3 failed",
    ],
)
def test_other_lines_are_shown(line) -> None:
    assert not is_foreign(line)
