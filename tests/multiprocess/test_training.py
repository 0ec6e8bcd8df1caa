"""Several workers train to the weights of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, Ended, run_alone, run_cluster
from tests.multiprocess.namespaces import can_make_hosts, hosts

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
    ended = run_cluster([_PROGRAM, str(num_devices), str(tmp_path)], num_workers)
    _check(ended, of_one_device, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("group_size", [2, 4])
def test_replicas_of_several_devices_train_to_the_weights_of_one_process(
    of_one_device: dict[str, Any], group_size: int, tmp_path: Path
) -> None:
    ended = run_cluster(
        [_PROGRAM, "4", str(tmp_path)], 2, STRATAGEM_TEST_GROUP_SIZE=str(group_size)
    )
    _check(ended, of_one_device, tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_hosts_with_addresses_of_their_own_train_to_the_same_weights(
    of_one_device: dict[str, Any], num_devices: int, tmp_path: Path
) -> None:
    with hosts(4) as four:
        ended = run_cluster([_PROGRAM, str(num_devices), str(tmp_path)], 4, four)
    _check(ended, of_one_device, tmp_path)


@pytest.mark.slow
def test_hosts_of_a_tpu_train_to_the_weights_of_one_process(
    of_one_device: dict[str, Any], tmp_path: Path
) -> None:
    """CPU devices stand for its chips."""
    ended = run_cluster([_PROGRAM, "4", str(tmp_path)], 2, STRATAGEM_TPU_PLATFORM="cpu")
    _check(ended, of_one_device, tmp_path)


def _check(every: list[Ended], of_one_device: dict[str, Any], folder: Path) -> None:
    for index, ended in enumerate(every):
        assert ended.code == 0, ended.errors
        got = dict(np.load(folder / f"process-{index}.npz"))
        assert got.keys() == of_one_device.keys()
        for name, wanted in of_one_device.items():
            np.testing.assert_allclose(got[name], wanted, rtol=1e-5, atol=1e-5, err_msg=name)
