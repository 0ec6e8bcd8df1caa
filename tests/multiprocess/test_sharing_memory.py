"""Sums in shared memory between real processes."""

from __future__ import annotations

import os
import signal

import pytest

from stratagem.collectives.shared_memory import is_supported
from tests.multiprocess.cluster import PROGRAMS, ended, run_cluster, started

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is shared on Linux on x86-64")

_PROGRAM = str(PROGRAMS / "sharing_memory.py")
_LIMITS = {"STRATAGEM_PEER_TIMEOUT_S": "8", "STRATAGEM_STUCK_TIMEOUT_S": "8"}


@pytest.mark.parametrize(
    ("num_workers", "num_devices"), [(2, 1), pytest.param(3, 2, marks=pytest.mark.slow)]
)
def test_sums_are_those_of_numpy(num_workers: int, num_devices: int, tmp_path) -> None:
    every = run_cluster(
        [_PROGRAM, "sums"],
        num_workers,
        STRATAGEM_CACHE_DIR=str(tmp_path),
        XLA_FLAGS=f"--xla_force_host_platform_device_count={num_devices}",
    )
    for one in every:
        assert one.code == 0, one.errors
        # The step of an sg.function and the sum in a loop are of other algorithms.
        assert "equal\nordered 2 of 4" in one.output


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_the_loss_of_a_process_ends_a_sum(how: str, tmp_path) -> None:
    limits = {**_LIMITS, "STRATAGEM_CACHE_DIR": str(tmp_path)}
    with started([_PROGRAM, how], 2, **limits) as processes:
        first = ended(processes[0])
        if how == "stop":  # nothing else ends it
            os.kill(processes[1].pid, signal.SIGKILL)
    assert "caught True\nordered 1 of 1" in first.output, first.errors
    assert first.code == 1
