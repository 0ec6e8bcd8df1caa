"""All-reduce with bfloat16 messages: its error, its gradients and the size of its messages."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.collectives.all_reduce import ChosenAllReduce
from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.packing import NumberedPacks
from stratagem.devices.mesh import Topology
from stratagem.options import ReduceOp
from tests.unit.devices.collectives.axes import AXES, messages, on_axis


@pytest.mark.parametrize("count", [2, 3, 6])
def test_bfloat16_is_off_by_no_more_than_is_stated_and_the_same_everywhere(count) -> None:
    axis = AXES[count]
    rng = np.random.default_rng(0)
    parts = (rng.normal(size=(count, 1001)) * 10.0 ** rng.integers(-3, 4, 1001)).astype(np.float32)
    reduction = ChosenAllReduce(axis, packing=NumberedPacks(1), in_bfloat16=True)
    got = on_axis(axis, lambda part: reduction.many(ReduceOp.SUM, [part])[0], parts)
    np.testing.assert_array_equal(got, [got[0]] * count)
    exact = parts.astype(np.float64)
    bound = 2.0**-8 * (np.abs(exact).sum(0) + np.abs(exact.sum(0)))
    error = np.abs(got[0] - exact.sum(0))
    assert np.all(error <= bound * 1.01)
    assert error.max() > 0
    at_hand = reduction.parts(ReduceOp.SUM, list(parts), are_gradients=True)
    np.testing.assert_array_equal(at_hand, got[0])


def test_bfloat16_is_for_gradients_of_float32_and_halves_their_messages() -> None:
    reduction = ChosenAllReduce(AXES[2], in_bfloat16=True)
    parts = np.array([[1.0], [2.0**-10]], np.float32)
    single = on_axis(AXES[2], lambda part: reduction.one(ReduceOp.SUM, part), parts)
    np.testing.assert_array_equal(single, [[1.0 + 2.0**-10]] * 2)
    assert float(reduction.parts(ReduceOp.SUM, list(parts), are_gradients=False)[0]) > 1
    assert messages(reduction, np.ones(3, np.int32)) == ["psum"]
    assert messages(reduction, np.ones(3, np.float32)) == ["all_to_all", "all_gather"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("row",))
    spec = PartitionSpec("row")
    mapped = jax.shard_map(
        lambda part: reduction.many(ReduceOp.SUM, [part[0]])[0][None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    text = jax.jit(mapped).lower(np.ones((2, 64), np.float32)).compile().as_text()
    sent = [line for line in text.splitlines() if " all-gather(" in line or " all-to-all(" in line]
    assert len(sent) == 2
    assert all("u16[" in line.split(" = ")[1].split("(%")[0] for line in sent)


def test_bfloat16_is_added_as_float32_where_replicas_have_several_devices() -> None:
    """Else XLA:CPU ends the process."""
    topology = Topology.of_groups([jax.devices()[:2], jax.devices()[2:4]])
    axis = ReplicaAxis.of(topology)
    assert axis.adds_wide
    assert not ReplicaAxis.of(Topology(tuple(jax.devices()[:2]))).adds_wide
    add = jax.shard_map(
        lambda x: ChosenAllReduce(axis).one(ReduceOp.SUM, x),
        mesh=topology.mesh,
        in_specs=PartitionSpec("replica"),
        out_specs=PartitionSpec(),
        axis_names={"replica"},
        check_vma=False,
    )
    parts = jnp.array([[1.0], [2.0**-8]], jnp.bfloat16)
    total = jax.jit(add)(parts)
    assert total.dtype == jnp.bfloat16
    assert float(total[0, 0]) == np.float32(1 + 2.0**-8).astype(ml_dtypes.bfloat16)
