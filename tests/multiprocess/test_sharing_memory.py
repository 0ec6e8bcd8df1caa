"""Sums in shared memory between real processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess

import numpy as np
import pytest

from stratagem.devices.all_reduce import Algorithm
from stratagem.devices.shared_sums import is_supported
from tests.multiprocess.cluster import PROGRAMS, addresses, ended, run_cluster, started

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is shared on Linux on x86-64")

_PROGRAM = str(PROGRAMS / "sharing_memory.py")
_TRAINING = str(PROGRAMS / "sharing_memory_training.py")
_ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_LIMITS = {"STRATAGEM_PEER_TIMEOUT_S": "8", "STRATAGEM_STUCK_TIMEOUT_S": "8"}


@pytest.mark.slow
@pytest.mark.parametrize(("num_workers", "num_devices"), [(2, 1), (3, 2)])
def test_sums_are_those_of_numpy(num_workers: int, num_devices: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    every = run_cluster(
        [_PROGRAM, "sums"],
        num_workers,
        XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count={num_devices}",
    )
    for one in every:
        assert one.code == 0, one.errors
        # The sum in a loop is of another algorithm.
        assert "equal\nordered 2 of 3" in one.output


@pytest.mark.slow
def test_programs_end_while_sums_are_under_way() -> None:
    for one in run_cluster([_PROGRAM, "end"], 2):
        assert one.code == 0, one.errors
        assert "ordered 1 of 1" in one.output


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "midway", "stop", "raise", "leave"])
def test_the_loss_of_a_process_ends_a_sum(how: str) -> None:
    with started([_PROGRAM, how], 2, **_LIMITS) as processes:
        first = ended(processes[0])
        if how == "stop":  # nothing else ends it
            os.kill(processes[1].pid, signal.SIGKILL)
    assert "caught True\nordered 1 of 1" in first.output, first.errors
    assert first.code == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 4])
def test_training_is_bitwise_that_of_another_algorithm(num_workers: int, tmp_path) -> None:
    for algorithm in (Algorithm.SHARED_MEMORY, Algorithm.TO_ONE_DEVICE):
        for one in run_cluster([_TRAINING, algorithm.value, str(tmp_path)], num_workers):
            assert one.code == 0, one.errors
            # Each of 10 steps sums one large array, and the others in a pack beside it.
            num_sums = 20 if algorithm is Algorithm.SHARED_MEMORY else 0
            assert f"shared {num_sums}\n" in one.output
    first, *others = (
        list(np.load(file).values())
        for algorithm in ("SHARED_MEMORY", "TO_ONE_DEVICE")
        for file in sorted(tmp_path.glob(f"{algorithm}-*.npz"))
    )
    assert len(others) == 2 * num_workers - 1
    for arrays in others:
        for array, expected in zip(arrays, first, strict=True):
            np.testing.assert_array_equal(array, expected)


def _can_be_alone() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*_ALONE, "true"], capture_output=True).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not _can_be_alone(), reason="no namespace of processes can be made here")
def test_processes_that_cannot_see_each_other_use_another_algorithm() -> None:
    """As in two containers of one machine."""
    first, second = addresses(2)
    for one in run_cluster([_PROGRAM, "end"], 2, [([], first), (_ALONE, second)]):
        assert one.code == 0, one.errors
        assert "ordered 0 of 1" in one.output
