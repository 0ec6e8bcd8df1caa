"""Sums, losses and local updates of several processes, against NumPy and against one process."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, assert_like, completed, written

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "num_workers", "num_devices"),
    [("TWO_STAGE", 2, 2), ("TWO_STAGE", 3, 1), ("HIERARCHICAL", 2, 2)],
)
def test_sums_are_those_of_numpy_and_equal_everywhere(name, num_workers, num_devices) -> None:
    """By algorithms that are written out in the program."""
    flags = os.environ.get("XLA_FLAGS", "")
    flags += f" --xla_force_host_platform_device_count={num_devices}"
    for one in completed([str(PROGRAMS / "sums.py"), name], num_workers, XLA_FLAGS=flags):
        assert f"equal {num_workers * num_devices}" in one.output


@pytest.mark.parametrize(("num_workers", "num_devices"), [(2, 1), (3, 1), (2, 2)])
def test_losses_are_those_of_one_device_however_they_are_written(num_workers, num_devices) -> None:
    program = [str(PROGRAMS / "ways_of_losses.py")]
    for one in completed(program, num_workers, JAX_NUM_CPU_DEVICES=str(num_devices)):
        assert one.output.splitlines()[-1] == f"equal {num_workers * num_devices}"


@pytest.mark.parametrize("kind", ["slow links", "islands"])
def test_local_updates_and_compressed_sums_are_those_of_one_process(kind, tmp_path: Path) -> None:
    """A process is a replica, or an island of two."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    size = 2 if kind == "islands" else 1
    command = [str(PROGRAMS / "slow_links.py"), kind]
    completed([*command, str(2 * size), str(size), str(tmp_path / "one")], 0)
    island = "process" if kind == "islands" else "1"
    completed([*command, str(size), island, str(tmp_path / "two")], 2)
    (wanted,) = written(tmp_path / "one", 1)
    first, second = written(tmp_path / "two", 2)
    assert len(wanted) == (18 if kind == "islands" else 6)
    for name, value in wanted.items():
        np.testing.assert_array_equal(first[name], second[name])
        np.testing.assert_allclose(first[name], value, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_large_weights_of_processes_are_gathered_in_blocks(num_devices, tmp_path: Path) -> None:
    """The last batch of 22 examples is uneven. Copies in one process have no blocks."""
    program = str(PROGRAMS / "blocks.py")
    completed([program, str(2 * num_devices), str(tmp_path)], 0)
    (expected,) = written(tmp_path, 1)
    assert not expected.pop("products").size
    completed([program, str(num_devices), str(tmp_path)], 2)
    for results in written(tmp_path, 2):
        # In the forward pass, and for the gradient of the layer before.
        products = np.unique(results.pop("products"), axis=0)
        np.testing.assert_array_equal(products, [[256 // (2 * num_devices), 150_000]])
        assert_like(results, expected)
