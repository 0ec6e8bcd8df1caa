"""Communicators: a single replica, and a replica of a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stratagem.devices.all_reduce import ReplicaAxis, SizedPacks
from stratagem.execution.communicator import MeshCommunicator, SoleCommunicator
from stratagem.options import ReduceOp
from stratagem.variables.distributed import PerReplica
from tests.unit.devices.axes import AXES, on_axis

STRATEGY = object()
VALUES = np.array([[1.0, 2.0], [3.0, 5.0], [7.0, 9.0]], np.float32)


@pytest.fixture
def sole() -> SoleCommunicator:
    return SoleCommunicator()


@pytest.fixture
def mesh() -> MeshCommunicator:
    return MeshCommunicator(AXES[3])


@pytest.mark.parametrize("dtype", ["int8", "bool", "bfloat16"])
def test_sole_replica_gets_the_dtypes_that_several_get(sole, mesh, dtype) -> None:
    value = np.ones((3, 2), getattr(ml_dtypes, dtype, dtype))
    for op in ReduceOp:
        several = on_axis(AXES[3], lambda x, op=op: mesh.all_reduce(op, x), value)
        alone = sole.all_reduce(op, jnp.asarray(value[0]))
        assert alone.dtype == several.dtype
        np.testing.assert_array_equal(alone.astype(jnp.float32), [1.0, 1.0])


def test_sole_replica_gathers_its_own_true_rows(sole) -> None:
    rows = np.arange(6).reshape(3, 2)
    np.testing.assert_array_equal(sole.all_gather(rows, 0, None), rows)
    np.testing.assert_array_equal(sole.all_gather(rows, 0, (2,)), rows[:2])
    np.testing.assert_array_equal(sole.all_gather(rows, 1, (1,)), rows[:, :1])


def test_mesh_replica_cannot_get_its_part_of_python_objects(mesh) -> None:
    objects = PerReplica(objects=("a", "b", "c"))
    words = r"merge_call returned PerReplica\[a \| b \| c\](?s:.)*config.run_eagerly"
    with pytest.raises(ValueError, match=words):
        on_axis(AXES[3], lambda _: mesh.merge(STRATEGY, lambda _: objects, (), {}), VALUES)


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
