"""Sends beside the steps, of several processes: the numbers of sends in a step's program."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster

_PROGRAM = str(PROGRAMS / "sends_beside.py")


@pytest.mark.slow
@pytest.mark.parametrize(("count", "size"), [(2, 1), (4, 2)])
def test_processes_train_to_what_sends_in_the_step_do(tmp_path: Path, count, size) -> None:
    for ended in run_cluster([_PROGRAM, str(size), str(tmp_path)], count):
        assert ended.code == 0, ended.errors
    for rank in range(count):
        found = np.load(tmp_path / f"process-{rank}.npz")
        beside = [name for name in found.files if " True " in name]
        assert len(beside) == len(found.files) / 2 > 20
        for name in beside:
            wanted = found[name.replace(" True ", " False ")]
            np.testing.assert_allclose(found[name], wanted, rtol=2e-5, atol=2e-6, err_msg=name)
