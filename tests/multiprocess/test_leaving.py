"""Loops over each process's own data may be left early, and nobody waits for what nobody reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("leaving")
    every = run_cluster(
        [str(PROGRAMS / "leaving.py"), str(folder)],
        2,
        STRATAGEM_STUCK_TIMEOUT_S="120",
        STRATAGEM_BARRIER_TIMEOUT_S="120",
    )
    for ended in every:
        assert ended.code == 0, ended.errors
    return [json.loads((folder / f"process-{index}.json").read_text()) for index in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "wanted"),
    [
        ("left by break", [[100, 102], True]),
        ("closed", [100, [0, 1]]),
        ("set back", [100, 102, 102]),
        ("dropped", [100, True]),
        ("to the end", [100, 102, 104, 106]),
        ("and goes on", [0, 1]),
    ],
)
def test_all_that_leave_a_loop_together_go_on_together(seen, what, wanted) -> None:
    assert [one[what] for one in seen] == [wanted] * 2


def test_one_that_goes_on_in_a_loop_that_another_left_learns_who(seen) -> None:
    first, other = (one["came apart"] for one in seen)
    assert "worker 1 (127.0.0.1:" in first
    assert "left the loop over dataset 5 (1), but worker 0 (127.0.0.1:" in first
    assert "needs batch 2" in first
    assert other is None
