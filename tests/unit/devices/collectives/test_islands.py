"""Islands: their replicas, and sums between them of which each replica sends a part."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.islands import Islands
from stratagem.devices.collectives.packing import NO_PACKING, SizedPacks
from stratagem.execution.communicator import MeshCommunicator
from stratagem.execution.compressed.between import IslandSums
from stratagem.options import ReduceOp
from tests.unit.devices.collectives.axes import on_axis

SHAPES = [(5, 3), (), (8,), (0,)]  # of a size that islands do not divide, too


def test_members_are_consecutive_and_peers_have_one_place() -> None:
    islands = Islands(6, 2)
    assert islands.count == 3
    assert islands.members == ((0, 1), (2, 3), (4, 5))
    assert islands.peers == ((0, 2, 4), (1, 3, 5))


@pytest.mark.parametrize("packing", [NO_PACKING, SizedPacks(40, 40)])
@pytest.mark.parametrize(("count", "size"), [(4, 2), (6, 2), (6, 3), (3, 1), (4, 4)])
def test_sums_are_those_of_one_array_per_island(count, size, packing) -> None:
    axis, islands = ReplicaAxis("row", count), Islands(count, size)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(islands.count, *shape)).astype("float32") for shape in SHAPES]
    own = [np.repeat(array, size, 0) for array in arrays]  # equal on the replicas of an island

    def replica(*values):
        communicator = MeshCommunicator(ChosenAllReduce(axis, packing=packing))
        sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))

        def add(parts):
            return sums.between.all_reduce_many(ReduceOp.SUM, parts)

        return sums.by_parts(add, values), sums.sent_equal(values[0]), sums.island_id

    totals, of_place, ids = on_axis(axis, replica, *own)
    for total, array in zip(totals, arrays, strict=True):
        np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))
        np.testing.assert_allclose(total[0], array.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_place, own[0])
    np.testing.assert_array_equal(ids, np.arange(count) // size)


def test_part_of_an_array_is_sent_between_islands() -> None:
    """A link between islands carries an array once, whatever the replicas of an island."""
    axis, islands = ReplicaAxis("row", 4), Islands(4, 2)
    sizes = []

    def replica(value):
        communicator = MeshCommunicator(ChosenAllReduce(axis))
        sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))

        def add(parts):
            sizes.append([part.size for part in parts])
            return sums.between.all_reduce_many(ReduceOp.SUM, parts)

        return sums.by_parts(add, [value])

    on_axis(axis, replica, np.ones((4, 10), np.float32))
    assert sizes == [[5]]
