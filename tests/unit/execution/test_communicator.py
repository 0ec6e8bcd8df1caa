"""Communicators of a mesh: sums among groups, and objects that no replica can be given."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.all_reduce import ReplicaAxis, SizedPacks
from stratagem.execution.communicator import MeshCommunicator
from stratagem.options import ReduceOp
from tests.unit.devices.axes import on_axis


@pytest.mark.parametrize(("packs", "expected"), [(False, 3), (True, 1)])
def test_values_among_groups_are_packed_if_asked(packs, expected) -> None:
    axis = ReplicaAxis("row", 4)
    whole = MeshCommunicator(axis, packing=SizedPacks(100, 100))
    parts = [np.arange(4.0 * size, dtype=np.float32).reshape(4, size) for size in (2, 3, 5)]

    def add(values):
        return whole.among(((0, 2), (1, 3)), packs=packs).all_reduce_many(ReduceOp.SUM, values)

    for part, total in zip(parts, on_axis(axis, add, parts), strict=True):
        np.testing.assert_array_equal(total, np.tile(part[:2] + part[2:], (2, 1)))
    program = jax.make_jaxpr(add, axis_env=[("row", 4)])([part[0] for part in parts])
    assert str(program).count("psum") == expected


def test_compiled_replica_cannot_get_its_part_of_python_objects(pair) -> None:
    objects = sg.PerReplica(objects=("a", "b"))
    words = r"merge_call returned PerReplica\[a \| b\](?s:.)*config.run_eagerly"
    with pytest.raises(ValueError, match=words):
        pair.run(lambda: sg.get_replica_context().merge_call(lambda _: objects))
