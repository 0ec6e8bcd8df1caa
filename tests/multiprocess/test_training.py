"""Several workers train to the weights of one process with the same global batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.marks import slow
from tests.multiprocess.cluster import PROGRAMS, assert_like, completed, written
from tests.multiprocess.namespaces import can_make_hosts, hosts

_PROGRAM = str(PROGRAMS / "training.py")


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    completed([_PROGRAM, "1", str(folder)], 0)
    return written(folder, 1)[0]


@pytest.mark.parametrize(
    ("num_workers", "num_devices", "variables"),
    [
        (2, 1, {}),
        slow(2, 2, {}),
        slow(4, 1, {}),
        slow(3, 2, {}),
        # Replicas of several devices.
        slow(2, 4, {"STRATAGEM_TEST_GROUP_SIZE": "2"}),
        slow(2, 4, {"STRATAGEM_TEST_GROUP_SIZE": "4"}),
        slow(2, 4, {"STRATAGEM_TPU_PLATFORM": "cpu"}),  # which stands for its chips
    ],
)
def test_workers_train_to_the_weights_of_one_process(
    of_one_device, num_workers, num_devices, variables, tmp_path
) -> None:
    """601 examples, batches of 64, the last one short: by `fit` and by a loop, with all that it
    reports."""
    completed([_PROGRAM, str(num_devices), str(tmp_path)], num_workers, **variables)
    for one in written(tmp_path, num_workers):
        assert_like(one, of_one_device)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2")
@pytest.mark.parametrize("num_devices", [1, 2])
def test_hosts_with_addresses_of_their_own_train_to_the_same_weights(
    of_one_device, num_devices: int, tmp_path: Path
) -> None:
    with hosts(4) as four:
        completed([_PROGRAM, str(num_devices), str(tmp_path)], 4, four)
    for one in written(tmp_path, 4):
        assert_like(one, of_one_device)
