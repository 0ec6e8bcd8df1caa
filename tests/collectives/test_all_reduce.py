"""Sums and means over replicas by each algorithm, with their gradients, against NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from stratagem.collectives import (
    NO_PACKING,
    WITHIN_PROCESS,
    Algorithm,
    AllReduce,
    Choice,
    ChosenAllReduce,
    GatheredAllReduce,
    NumberedPacks,
    ReplicaAxis,
)
from stratagem.options import ReduceOp
from stratagem.topology import Topology

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SUM_DTYPES = {"bool": np.int32, "scalar": np.float32, "empty": np.float32, "bfloat16": BFLOAT16}
MEAN_DTYPES = {"float16": np.float16, "bfloat16": BFLOAT16}
AXES = {
    2: ReplicaAxis("row", 2),
    3: ReplicaAxis("row", 3),
    4: ReplicaAxis("row", 4, ((0, 1), (2, 3))),
    6: ReplicaAxis("row", 6, ((0, 2, 4), (1, 3, 5))),
}
ALGORITHMS = list(Algorithm)


def of_parts(count: int) -> dict[str, Any]:
    """Exact in every dtype, and different on every replica."""
    base = np.arange(count * 5).reshape(count, 5) % 7 - 3
    parts = {
        name: (base / (1 if "int" in name else 2)).astype(dtype)
        for name, dtype in {
            "float32": np.float32,
            "float16": np.float16,
            "bfloat16": BFLOAT16,
            "int32": np.int32,
            "int8": np.int8,
        }.items()
    }
    parts["bool"] = base > 0
    parts["scalar"] = np.arange(count, dtype=np.float32)
    parts["empty"] = np.zeros((count, 0), np.float32)
    parts["matrix"] = np.arange(count * 6, dtype=np.float32).reshape(count, 2, 3)
    return parts


def on_axis(axis: ReplicaAxis, function: Callable[..., Any], *parts: Any) -> Any:
    """Calls a function once a replica; axis 0 of the parts and of the results is the replicas."""

    def body(*local: Any) -> Any:
        own = jax.tree.map(lambda part: part[0], local)
        return jax.tree.map(lambda value: jnp.asarray(value)[None], function(*own))

    mesh = Mesh(np.array(jax.devices()[: axis.size]), (axis.name,))
    spec = PartitionSpec(axis.name)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*parts))


@pytest.mark.parametrize("count", list(AXES))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_every_replica_the_sum_and_the_mean(
    algorithm, count, tolerance
) -> None:
    reduction = ChosenAllReduce(AXES[count], Choice(algorithm))
    all_parts = of_parts(count)

    def reduce(parts):
        return {
            op.name: {name: reduction.one(op, part) for name, part in parts.items()}
            for op in ReduceOp
        }

    result = on_axis(AXES[count], reduce, all_parts)
    for name, parts in all_parts.items():
        exact = parts.astype(np.float64)
        total, mean = result["SUM"][name], result["MEAN"][name]
        assert total.dtype == np.dtype(SUM_DTYPES.get(name, parts.dtype))
        assert mean.dtype == MEAN_DTYPES.get(name, np.float32)
        for replica in range(count):
            np.testing.assert_array_equal(total[replica].astype(np.float64), exact.sum(0))
            np.testing.assert_allclose(
                mean[replica].astype(np.float64), exact.mean(0), **tolerance(mean.dtype)
            )


@pytest.mark.parametrize("in_bfloat16", [False, True])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_gradient_is_the_same_reduction_of_the_incoming_ones(algorithm, in_bfloat16) -> None:
    axis = AXES[4]
    reduction = ChosenAllReduce(axis, Choice(algorithm), in_bfloat16=in_bfloat16)

    def gradient(value, incoming):
        _, pull = jax.vjp(lambda x: reduction.many(ReduceOp.MEAN, [x])[0], value)
        return pull(incoming)[0]

    incoming = np.array([[2.0, 1.0], [5.0, 0.0], [7.0, 0.0], [6.0, 1.0]], np.float32)
    result = on_axis(axis, gradient, np.zeros((4, 2), np.float32), incoming)
    np.testing.assert_array_equal(result, [[5.0, 0.5]] * 4)


def messages(reduction: AllReduce, *parts: Any) -> list[str]:
    """The collectives of a reduction of many values, as its program names them."""

    def primitives(jaxpr):
        for equation in jaxpr.eqns:
            yield equation.primitive.name
            for inner in jax.tree.leaves(
                list(equation.params.values()),
                is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr"),
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from primitives(getattr(inner, "jaxpr", inner))

    program = jax.make_jaxpr(
        lambda parts: reduction.many(ReduceOp.SUM, parts),
        axis_env=[(reduction.axis.name, reduction.axis.size)],
    )(list(parts))
    known = ("psum", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum_scatter")
    return [name for name in primitives(program.jaxpr) if name.startswith(known)]


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm.COMPILER, ["psum"]),
        (Algorithm.RING, ["ppermute"] * 6),
        (Algorithm.HIERARCHICAL, ["reduce_scatter", "psum", "all_gather"]),
        (Algorithm.TO_ONE_DEVICE, ["all_gather"]),
    ],
)
def test_algorithms_send_the_messages_they_are_named_after(algorithm, expected) -> None:
    reduction = ChosenAllReduce(AXES[4], Choice(algorithm))
    assert messages(reduction, np.ones(8, np.float32)) == expected


def test_size_chooses_the_algorithm() -> None:
    choice = Choice(Algorithm.RING, ((1024, Algorithm.TO_ONE_DEVICE), (4096, Algorithm.COMPILER)))
    reduction = ChosenAllReduce(AXES[2], choice)
    for count, expected in [(256, "all_gather"), (257, "psum"), (1024, "psum"), (1025, "ppermute")]:
        assert set(messages(reduction, np.ones(count, np.float32))) == {expected}


@pytest.mark.parametrize(
    ("packing", "count"), [(NO_PACKING, 10), (WITHIN_PROCESS, 7), (NumberedPacks(1), 6)]
)
def test_packed_reduction_matches_single_ones_in_fewer_messages(packing, count) -> None:
    axis = AXES[3]
    large = np.arange(3 * 20_000, dtype=np.float32).reshape(3, 100, 200)
    parts = [*of_parts(3).values(), large]
    reduction = ChosenAllReduce(axis, packing=packing)

    def both(parts):
        packed = reduction.many(ReduceOp.MEAN, parts)
        return packed, [reduction.one(ReduceOp.MEAN, part) for part in parts]

    packed, single = on_axis(axis, both, parts)
    for got, expected in zip(packed, single, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    has_empty = packing is NO_PACKING  # nothing is sent for an empty array by itself
    assert len(messages(reduction, *(part[0] for part in parts))) == count - has_empty


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


def test_function_that_sees_all_values_takes_the_place_of_the_algorithms() -> None:
    seen = []

    def largest(op, stacks):
        seen.append((op, [len(parts) for parts in stacks]))
        return [functools.reduce(jnp.maximum, parts) for parts in stacks]

    reduction = GatheredAllReduce(AXES[3], largest)
    parts = {"a": np.array([1.0, 9.0, 4.0]), "b": np.array([[1, 2], [3, 0], [0, 1]], np.int32)}
    got = on_axis(
        AXES[3], lambda parts: reduction.many(ReduceOp.SUM, [parts["a"], parts["b"]]), parts
    )
    assert seen == [(ReduceOp.SUM, [3, 3])]
    np.testing.assert_array_equal(got[0], [9.0] * 3)
    np.testing.assert_array_equal(got[1], [[3, 2]] * 3)
    single = on_axis(AXES[3], lambda parts: reduction.one(ReduceOp.MEAN, parts["a"]), parts)
    np.testing.assert_array_equal(single, [9.0] * 3)
    at_hand = reduction.parts(ReduceOp.SUM, [1.0, 5.0], are_gradients=True)
    assert float(at_hand) == 5.0


@pytest.mark.parametrize(
    ("count", "groups"),
    [(1, ()), (2, ()), (3, ()), (4, ((0, 1), (2, 3))), (6, ((0, 1, 2), (3, 4, 5)))],
)
def test_devices_of_one_process_form_two_groups_from_four_on(count, groups) -> None:
    axis = ReplicaAxis.of(Topology(tuple(jax.devices()[:count])))
    assert (axis.name, axis.size, axis.groups) == ("replica", count, groups)


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
