"""Local updates and compressed sums: two processes train to what two devices of one do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "slow_links.py")


@pytest.mark.slow
def test_processes_train_to_what_devices_do(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    alone = run_alone([_PROGRAM, "2", str(tmp_path / "one")])
    every = run_cluster([_PROGRAM, "1", str(tmp_path / "two")], 2)
    for ended in (alone, *every):
        assert ended.code == 0, ended.errors
    wanted = np.load(tmp_path / "one" / "process-0.npz")
    first, second = (np.load(tmp_path / "two" / f"process-{rank}.npz") for rank in range(2))
    assert len(wanted.files) == 6
    for name in wanted.files:
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], wanted[name], atol=2e-5, err_msg=name)
