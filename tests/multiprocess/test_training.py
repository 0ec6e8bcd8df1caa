"""Several workers train to the weights of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "training.py")


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    ended = run_alone([_PROGRAM, "1", str(folder)])
    assert ended.code == 0, ended.errors
    return dict(np.load(folder / "process-0.npz"))


@pytest.mark.parametrize(
    ("num_workers", "num_devices"),
    [
        (2, 1),
        pytest.param(2, 2, marks=pytest.mark.slow),
        pytest.param(4, 1, marks=pytest.mark.slow),
        pytest.param(3, 2, marks=pytest.mark.slow),
    ],
)
def test_workers_train_to_the_weights_of_one_process(
    of_one_device: dict[str, Any], num_workers: int, num_devices: int, tmp_path: Path
) -> None:
    """601 examples, batches of 64, the last one short: by `fit` and by a loop, with all that it
    reports."""
    for ended in run_cluster([_PROGRAM, str(num_devices), str(tmp_path)], num_workers):
        assert ended.code == 0, ended.errors
    for index in range(num_workers):
        got = dict(np.load(tmp_path / f"process-{index}.npz"))
        assert got.keys() == of_one_device.keys()
        for name, wanted in of_one_device.items():
            np.testing.assert_allclose(got[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
