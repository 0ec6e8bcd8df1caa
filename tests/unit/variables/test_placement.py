"""Placement of variables and of state: sharded if large, else on the replicas."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.finding import find_devices
from stratagem.devices.mesh import Topology
from stratagem.variables.placement import ShardedState
from stratagem.variables.sharded_store import ShardedStore
from stratagem.variables.store import store_of


def replicas(count: int) -> Topology:
    return Topology(find_devices([f"cpu:{index}" for index in range(count)]))


@pytest.mark.parametrize("is_all", [False, True])
def test_state_is_parted_where_it_is_large_and_can_be(is_all) -> None:
    policy = ShardedState(ShardedStore(replicas(2)), "all" if is_all else "optimizer")
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


@pytest.mark.parametrize(
    ("shard_state", "weight", "slot"),
    [(None, False, False), ("optimizer", False, True), ("all", True, True)],
)
def test_layouts_and_sharded_state_go_together(shard_state, weight, slot) -> None:
    strategy = sg.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        devices_per_replica=2,
        layout_map={"kernel": (None, "logical"), "table": ("logical", "replica")},
        shard_state=shard_state,
    )
    with strategy.scope():
        kernel = sg.Variable(np.zeros((64, 32)), name="kernel")
        table = sg.Variable(np.zeros((4, 8)), name="table")
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        optimizer.build([kernel, table])
    of_kernel, of_table = optimizer.variables[2:]
    assert [store_of(one) is not None for one in (kernel, of_kernel)] == [weight, slot]
    # A layout that names the replicas holds with and without `shard_state`.
    assert shapes_of_shards(table) == shapes_of_shards(of_table) == {(2, 4)}
    assert shapes_of_shards(kernel) == {(32, 16) if weight else (64, 16)}
    assert shapes_of_shards(of_kernel) == {(32, 16) if slot else (64, 16)}
    value = np.arange(2048.0, dtype="float32").reshape(64, 32)
    kernel.assign(value)
    for read in (kernel.numpy(), kernel.value, np.asarray(kernel)):
        np.testing.assert_array_equal(read, value)


def shapes_of_shards(variable: Any) -> set[tuple[int, ...]]:
    return {shard.data.shape for shard in variable.stored.addressable_shards}


@pytest.mark.parametrize(
    ("shard_state", "shape", "shard"),
    [
        ("all", (64, 32), (32, 16)),
        ("all", (64, 33), (32, 33)),  # no second axis
        ("all", (2048,), (1024,)),
        ("all", (8, 8), (8, 8)),  # small
        ("optimizer", (64, 32), (64, 32)),
    ],
)
def test_variables_without_a_layout_are_in_parts_of_both_axes(shard_state, shape, shard) -> None:
    strategy = sg.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2", "cpu:3"],
        devices_per_replica=2,
        layout_map={"kernel": (None, "logical"), "whole": (None,)},
        shard_state=shard_state,
    )
    value = np.arange(np.prod(shape), dtype="float32").reshape(shape)
    with strategy.scope():
        other = sg.Variable(value, name="other")
        whole = sg.Variable(np.zeros((64, 32)), name="whole")
    assert shapes_of_shards(other) == {shard}
    assert shapes_of_shards(whole) == {(32 if shard_state == "all" else 64, 32)}
    np.testing.assert_array_equal(other.value, value)
