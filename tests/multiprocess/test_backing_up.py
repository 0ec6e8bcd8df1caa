"""Several workers go on at the next batch after one of them was killed."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster, started

_PROGRAM = str(PROGRAMS / "backing_up.py")


def _results(folder: Path) -> list[dict[str, Any]]:
    every = run_cluster([_PROGRAM, str(folder), "-2" if folder.name == "undisturbed" else "-1"], 2)
    for one in every:
        assert one.code == 0, one.errors
    return [dict(np.load(folder / f"process-{rank}.npz")) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_group_that_lost_a_worker_ends_with_the_weights_of_one_that_did_not(
    victim: int, tmp_path: Path
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    undisturbed.mkdir()
    disturbed.mkdir()
    wanted = _results(undisturbed)
    with started([_PROGRAM, str(disturbed), str(victim)], 2) as processes:
        assert processes[victim].wait(timeout=300) == -signal.SIGKILL
    assert [path.name for path in (disturbed / "backup").glob("backup-?")] == ["backup-5"]
    got = _results(disturbed)
    assert not (disturbed / "backup").exists()
    for one, other in zip(got, wanted, strict=True):
        assert one.keys() == other.keys()
        for name, value in other.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)
