"""Elastic groups over hosts: a member is killed, or a host is cut off from the others."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, Ended, run_cluster
from tests.multiprocess.elastic_reference import reference, weights_of
from tests.multiprocess.namespaces import can_make_hosts, hosts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="network namespaces need root and iproute2"),
]

_PROGRAM = str(PROGRAMS / "elastic.py")
# On hosts of their own, processes do not see each other. The first process of such a host ignores
# signals of its own, so that the program is another one's child.
_ALONE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
_AS_CHILD = ["sh", "-c", '"$@" & wait $!', "sh"]
_KILLED = 128 + signal.SIGKILL
_PEER_S = 3


def _train(folder: Path, places: list[int], *moments: str) -> list[Ended]:
    """Runs members of a group, each on the host of that place."""
    with hosts(max(places) + 1) as made:
        members: list[tuple[list[str], str]] = []
        for member, place in enumerate(places):
            command, address = made[place]
            name = address.rpartition(":")[0]
            members.append(([*command, *_ALONE, *_AS_CHILD], f"{name}:{2222 + member}"))
        return run_cluster(
            [_PROGRAM, str(folder), "fit", *moments],
            len(places),
            members,
            STRATAGEM_PEER_TIMEOUT_S=str(_PEER_S),
        )


def _check_against_keras(folder: Path, members: list[int], all_after: int) -> None:
    """Members have the weights of Keras alone, and few of them trained after so many steps."""
    weights, logs = reference()
    for member in members:
        result = np.load(folder / f"member-{member}.npz")
        for mine, wanted in zip(weights_of(result), weights, strict=True):
            np.testing.assert_allclose(mine, wanted, atol=2e-5)
        np.testing.assert_allclose(result["losses"], logs, rtol=1e-4)
        left = sum(1 << one for one in members)
        assert result["members"][0] > left
        assert set(result["members"][all_after:].tolist()) == {left}


@pytest.mark.parametrize("moment", ["0:3", "1:7:in"])
def test_the_member_on_the_other_host_continues(tmp_path: Path, moment: str) -> None:
    killed = int(moment[0])
    every = _train(tmp_path, [0, 1], moment)
    assert every[killed].code == _KILLED, every[killed].errors
    assert every[1 - killed].code == 0, every[1 - killed].errors
    assert f"Lost worker {killed}" in every[1 - killed].errors + every[1 - killed].output
    _check_against_keras(tmp_path, [1 - killed], int(moment.split(":")[1]) + 1)


def test_most_members_continue_without_a_host_that_is_cut_off(tmp_path: Path) -> None:
    first, second, cut_off = _train(tmp_path, [0, 0, 1], "2:4:cut")
    for one in (first, second):
        assert one.code == 0, one.errors
    _check_against_keras(tmp_path, [0, 1], 5)
    assert cut_off.code == 1
    assert "1 of 3 members are left" in cut_off.errors
    assert "SG506" in cut_off.errors


def test_two_hosts_that_are_cut_off_from_each_other_both_end(tmp_path: Path) -> None:
    for one in _train(tmp_path, [0, 1], "1:4:cut"):
        assert one.code == 1
        assert f"did not answer for {_PEER_S} s, and only 1 of 2 members are left" in one.errors
        assert "SG506" in one.errors
