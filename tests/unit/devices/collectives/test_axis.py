"""Groups of replicas on an axis: processes, halves of a process, and slices."""

from __future__ import annotations

import jax
import pytest

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.mesh import Topology
from tests.unit.devices.topology.test_tpu_coordinates import chips


def topology_of(num_slices: int) -> Topology:
    return Topology(
        tuple(chip for n in range(num_slices) for chip in chips(2, 2, rows_a_host=1, slice_index=n))
    )


def test_replicas_of_a_slice_form_a_group_whatever_their_hosts() -> None:
    topology = topology_of(2)
    assert {device.process_index for device in topology.devices or ()} == {0, 1, 2, 3}
    assert ReplicaAxis.of(topology).groups == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert ReplicaAxis.of(topology_of(1)).groups == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("count", "groups"),
    [(1, ()), (2, ()), (3, ()), (4, ((0, 1), (2, 3))), (6, ((0, 1, 2), (3, 4, 5)))],
)
def test_devices_of_one_process_form_two_groups_from_four_on(count, groups) -> None:
    axis = ReplicaAxis.of(Topology(tuple(jax.devices()[:count])))
    assert (axis.name, axis.size, axis.groups) == ("replica", count, groups)


def test_devices_of_a_process_form_a_group() -> None:
    class Device:
        platform = "cpu"

        def __init__(self, process_index):
            self.process_index = process_index

    def groups(*processes):
        return ReplicaAxis.of(Topology(tuple(Device(one) for one in processes))).groups

    assert groups(0, 0, 1, 1) == ((0, 1), (2, 3))
    assert groups(0, 1, 0, 1) == ((0, 2), (1, 3))
    assert groups(0, 1, 2, 3) == ()
    assert groups(0, 0, 1) == ()
    assert ReplicaAxis.of(Topology(None)).size == 1
