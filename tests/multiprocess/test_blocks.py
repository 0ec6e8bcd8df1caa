"""A weight that a step gathers in blocks from two processes, compared with copies in one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "blocks.py")


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_large_weights_of_processes_are_gathered_in_blocks(
    num_devices: int, tmp_path: Path
) -> None:
    """The last batch of 22 examples is uneven."""
    reference = run_alone([_PROGRAM, str(2 * num_devices), str(tmp_path)])
    assert reference.code == 0, reference.errors
    expected = dict(np.load(tmp_path / "process-0.npz"))
    assert not expected.pop("products").size
    for ended in run_cluster([_PROGRAM, str(num_devices), str(tmp_path)], 2):
        assert ended.code == 0, ended.errors
    for rank in range(2):
        results = dict(np.load(tmp_path / f"process-{rank}.npz"))
        # In the forward pass, and for the gradient of the layer before.
        np.testing.assert_array_equal(
            np.unique(results.pop("products"), axis=0), [[256 // (2 * num_devices), 150_000]]
        )
        assert results.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_allclose(results[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
