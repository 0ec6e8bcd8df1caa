"""Losses of several processes are those of one device, however they are written."""

from __future__ import annotations

import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_devices"), [(2, 1), (3, 1), (2, 2)])
def test_losses_of_several_processes(num_workers: int, num_devices: int) -> None:
    program = [str(PROGRAMS / "ways_of_losses.py")]
    for ended in run_cluster(program, num_workers, JAX_NUM_CPU_DEVICES=str(num_devices)):
        assert ended.code == 0, ended.errors
        assert ended.output.splitlines()[-1] == f"equal {num_workers * num_devices}"
