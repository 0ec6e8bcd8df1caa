"""Placement of variables and of state: sharded if large, else on the replicas."""

from __future__ import annotations

import numpy as np
import pytest

import stratagem as sg
from stratagem.topology import Topology, find_devices
from stratagem.variables import ShardedState, ShardedStore, store_of


def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


@pytest.mark.parametrize("is_all", [False, True])
def test_state_is_parted_where_it_is_large_and_can_be(is_all) -> None:
    policy = ShardedState(ShardedStore(replicas(2)), is_all=is_all)
    policy.check()
    owner = np.zeros((64, 32))
    assert policy.choose(owner, slot_of=owner) is policy.store
    assert (policy.choose(owner, slot_of=None) is policy.store) == is_all
    for other in (np.zeros((8, 8)), np.zeros((63, 33)), np.zeros(())):
        assert policy.choose(other, slot_of=other) is None


def test_other_variables_are_kept_nowhere() -> None:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        assert store_of(sg.Variable(1.0)) is None
    assert store_of(sg.Variable(1.0)) is None
