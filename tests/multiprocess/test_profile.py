"""A profile of one worker among several."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.observe.profiling import read_profile
from tests.multiprocess.cluster import PROGRAMS, run_cluster


@pytest.mark.slow
def test_chosen_worker_is_profiled_while_all_train(tmp_path: Path) -> None:
    ended = run_cluster([str(PROGRAMS / "profiled.py"), str(tmp_path)], 2)
    assert [one.code for one in ended] == [0, 0], [one.errors for one in ended]
    assert [(tmp_path / f"process-{index}.txt").read_text() for index in (0, 1)] == ["0", "3"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["worker-1"]
    summary = read_profile(tmp_path)
    assert (summary.num_devices, summary.num_steps) == (1, 3)
    assert summary.parts_s["collectives"] > 0
    assert sum(summary.parts_s.values()) == pytest.approx(summary.whole_s)
    assert "Worker 1, steps 2 to 4" in ended[1].output
    assert "Worker" not in ended[0].output
