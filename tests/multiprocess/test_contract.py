"""The contract suite on a cluster: each process runs the same tests in the same order."""

from __future__ import annotations

import pytest

from tests.multiprocess.cluster import run_cluster

pytestmark = pytest.mark.slow

_PYTEST = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/contract"]
_IN_PARTS = {"STRATAGEM_TEST_IN_PARTS": "1"}


@pytest.mark.parametrize(
    ("num_workers", "num_devices", "group_size", "choice", "variables"),
    [
        (2, 2, 1, "not eager and (collectives or reduce_and_gather or empty)", {}),
        (2, 2, 1, "not eager", {}),
        (2, 2, 1, "eager", {}),
        (2, 4, 2, "not eager", {}),
        (2, 2, 1, "not eager", _IN_PARTS),
        (2, 2, 1, "eager", _IN_PARTS),
    ],
)
def test_contract_holds_on_a_cluster(
    num_workers: int, num_devices: int, group_size: int, choice: str, variables: dict[str, str]
) -> None:
    every = run_cluster(
        [*_PYTEST, "-k", choice],
        num_workers,
        STRATAGEM_TEST_DEVICES=str(num_devices),
        STRATAGEM_TEST_REPLICAS=str(num_workers * num_devices // group_size),
        STRATAGEM_TEST_GROUP_SIZE=str(group_size),
        STRATAGEM_PEER_TIMEOUT_S="20",
        STRATAGEM_STUCK_TIMEOUT_S="30",
        STRATAGEM_BARRIER_TIMEOUT_S="30",
        **variables,
    )
    for ended in every:
        assert ended.code == 0, ended.output[-4000:]
        assert "failed" not in ended.output.splitlines()[-1]
        assert int(ended.output.splitlines()[-1].split(" passed")[0]) > 50
