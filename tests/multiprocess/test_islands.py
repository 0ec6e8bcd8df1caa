"""Islands: the devices of two processes train to what those of one do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "islands.py")


@pytest.mark.slow
def test_process_is_an_island(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = run_alone([_PROGRAM, "4", "2", str(tmp_path / "one")])
    every = run_cluster([_PROGRAM, "2", "process", str(tmp_path / "two")], 2)
    for ended in (alone, *every):
        assert ended.code == 0, ended.errors
    wanted = np.load(tmp_path / "one" / "process-0.npz")
    first, second = (np.load(tmp_path / "two" / f"process-{rank}.npz") for rank in range(2))
    assert len(wanted.files) == 18
    for name in wanted.files:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], wanted[name], atol=2e-5, err_msg=name)
