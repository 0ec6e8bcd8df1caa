"""Sums between real processes by algorithms written out in the program, against NumPy."""

from __future__ import annotations

import os

import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_workers", "num_devices"),
    [("TWO_STAGE", 2, 2), ("TWO_STAGE", 3, 1), ("HIERARCHICAL", 2, 2)],
)
def test_sums_are_those_of_numpy_and_equal_everywhere(name, num_workers, num_devices) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    every = run_cluster(
        [str(PROGRAMS / "sums.py"), name],
        num_workers,
        XLA_FLAGS=f"{flags} --xla_force_host_platform_device_count={num_devices}",
    )
    for one in every:
        assert one.code == 0, one.errors
        assert f"equal {num_workers * num_devices}" in one.output
