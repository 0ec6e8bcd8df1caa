"""The table of differences to one device: each mesh once, and its numbers."""

from __future__ import annotations

import math

import pytest

from benchmarks.large_models.exactness import (
    MESHES,
    POLICIES,
    TECHNIQUES,
    Mesh,
    Row,
    compare,
    make_table,
)


def test_meshes_are_all_that_eight_devices_form_of_small_axes() -> None:
    sizes = {(one.data, one.shard, one.model) for one in MESHES}
    assert len(sizes) == len(MESHES) == 7
    assert {math.prod(one) for one in sizes} == {8}
    assert {size for one in sizes for size in one} == {1, 2, 4}


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_strategy_has_the_axes_of_the_mesh(mesh: Mesh) -> None:
    topology = mesh.strategy().topology
    assert topology.num_logical_devices == mesh.model
    assert topology.num_replicas == mesh.data * mesh.shard
    if mesh.shard > 1:
        assert topology.num_shards == mesh.shard


@pytest.mark.slow
@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("policy", POLICIES)
def test_training_is_that_of_one_device(policy: str, technique: str) -> None:
    row = compare(policy, technique)
    bound = 1e-5 if policy == "float32" else 2e-2
    assert max(row.differences.values()) < bound
    assert row.change > 100 * bound or policy != "float32"


def test_table_has_a_column_for_each_mesh() -> None:
    meshes = [Mesh(1, 2, 4), Mesh(4, 2, 1)]
    row = Row("float32", "LoRA", {meshes[0]: 1e-8, meshes[1]: 2e-7}, 0.01)
    *_, last = make_table([row], meshes).splitlines()
    assert last == "| float32 | LoRA | 1.0e-02 | 1.0e-08 | 2.0e-07 |"
