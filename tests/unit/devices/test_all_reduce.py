"""Sums and means over replicas by each algorithm, with their gradients, against NumPy."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.all_reduce import (
    NO_PACKING,
    WITHIN_PROCESS,
    Algorithm,
    NumberedPacks,
    ReplicaAxis,
    SizedPacks,
    algorithm_for,
    hierarchical_sum,
    is_sum_over_replicas,
    joined,
    one_device_sum,
    packing_for,
    ring_sum,
    two_stage_sum,
)
from stratagem.devices.mesh import Topology
from stratagem.execution.communicator import MeshCommunicator
from stratagem.options import ReduceOp
from tests.unit.devices.axes import AXES, messages, on_axis
from tests.unit.devices.topology.test_tpu_coordinates import chips

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SUM_DTYPES = {"bool": np.int32, "scalar": np.float32, "empty": np.float32, "bfloat16": BFLOAT16}
MEAN_DTYPES = {"float16": np.float16, "bfloat16": BFLOAT16}
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


@pytest.mark.parametrize(
    "count",
    [count if count == 2 else pytest.param(count, marks=pytest.mark.slow) for count in AXES],
)
@pytest.mark.parametrize(
    "algorithm",
    [
        one if one == "shared memory" else pytest.param(one, marks=pytest.mark.slow)
        for one in ALGORITHMS
    ],
)
def test_every_algorithm_gives_every_replica_the_sum_and_the_mean(
    algorithm, count, tolerance
) -> None:
    reduction = MeshCommunicator(AXES[count], algorithm)
    all_parts = of_parts(count)

    def reduce(parts):
        return {
            op.name: {name: reduction.all_reduce(op, part) for name, part in parts.items()}
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


@pytest.mark.parametrize(
    ("algorithm", "in_bfloat16"), [*((one, False) for one in ALGORITHMS), (Algorithm.RING, True)]
)
def test_gradient_is_the_same_reduction_of_the_incoming_ones(algorithm, in_bfloat16) -> None:
    axis = AXES[4]
    reduction = MeshCommunicator(axis, algorithm, in_bfloat16=in_bfloat16)

    def gradient(value, incoming):
        _, pull = jax.vjp(lambda x: reduction.all_reduce_many(ReduceOp.MEAN, [x])[0], value)
        return pull(incoming)[0]

    incoming = np.array([[2.0, 1.0], [5.0, 0.0], [7.0, 0.0], [6.0, 1.0]], np.float32)
    result = on_axis(axis, gradient, np.zeros((4, 2), np.float32), incoming)
    np.testing.assert_array_equal(result, [[5.0, 0.5]] * 4)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Algorithm.COMPILER, ["psum"]),
        (Algorithm.RING, ["ppermute"] * 6),
        (Algorithm.HIERARCHICAL, ["reduce_scatter", "psum", "all_gather"]),
        (Algorithm.TWO_STAGE, ["reduce_scatter", "all_to_all", "all_to_all", "all_gather"]),
        (Algorithm.TO_ONE_DEVICE, ["all_gather"]),
    ],
)
def test_algorithms_send_the_messages_they_are_named_after(algorithm, expected) -> None:
    reduction = MeshCommunicator(AXES[4], algorithm)
    assert messages(reduction, np.ones(8, np.float32)) == expected


def test_size_chooses_the_algorithm() -> None:
    def rule(size_bytes: int) -> Algorithm:
        if size_bytes <= 1024:
            return Algorithm.TO_ONE_DEVICE
        return Algorithm.COMPILER if size_bytes <= 4096 else Algorithm.RING

    reduction = MeshCommunicator(AXES[2], rule)
    for count, expected in [(256, "all_gather"), (257, "psum"), (1024, "psum"), (1025, "ppermute")]:
        assert set(messages(reduction, np.ones(count, np.float32))) == {expected}


@pytest.mark.parametrize(
    ("packing", "count"), [(NO_PACKING, 10), (WITHIN_PROCESS, 7), (NumberedPacks(1), 6)]
)
def test_packed_reduction_matches_single_ones_in_fewer_messages(packing, count) -> None:
    axis = AXES[3]
    large = np.arange(3 * 20_000, dtype=np.float32).reshape(3, 100, 200)
    parts = [*of_parts(3).values(), large]
    reduction = MeshCommunicator(axis, packing=packing)

    def both(parts):
        packed = reduction.all_reduce_many(ReduceOp.MEAN, parts)
        return packed, [reduction.all_reduce(ReduceOp.MEAN, part) for part in parts]

    packed, single = on_axis(axis, both, parts)
    for got, expected in zip(packed, single, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    has_empty = packing is NO_PACKING  # nothing is sent for an empty array by itself
    assert len(messages(reduction, *(part[0] for part in parts))) == count - has_empty


def test_function_that_sees_all_values_takes_the_place_of_the_algorithms() -> None:
    seen = []

    def largest(op, stacks):
        seen.append((op, [len(parts) for parts in stacks]))
        return [functools.reduce(jnp.maximum, parts) for parts in stacks]

    reduction = MeshCommunicator(AXES[3], combine=largest)
    parts = {"a": np.array([1.0, 9.0, 4.0]), "b": np.array([[1, 2], [3, 0], [0, 1]], np.int32)}
    got = on_axis(
        AXES[3],
        lambda parts: reduction.all_reduce_many(ReduceOp.SUM, [parts["a"], parts["b"]]),
        parts,
    )
    assert seen == [(ReduceOp.SUM, [3, 3])]
    np.testing.assert_array_equal(got[0], [9.0] * 3)
    np.testing.assert_array_equal(got[1], [[3, 2]] * 3)
    single = on_axis(AXES[3], lambda parts: reduction.all_reduce(ReduceOp.MEAN, parts["a"]), parts)
    np.testing.assert_array_equal(single, [9.0] * 3)
    at_hand = reduction.parts(ReduceOp.SUM, [1.0, 5.0], are_gradients=True)
    assert float(at_hand) == 5.0


# Rings, and sums in one and two stages against NumPy: alone and in groups.

AXES_OF_TWO_STAGE = {
    "2": ReplicaAxis("row", 2),
    "3": ReplicaAxis("row", 3),
    "5": ReplicaAxis("row", 5),
    "halves of 4": ReplicaAxis("row", 4, ((0, 1), (2, 3))),
    "pairs of 6": ReplicaAxis("row", 6, ((0, 1), (2, 3), (4, 5))),
    "every second of 6": ReplicaAxis("row", 6, ((0, 2, 4), (1, 3, 5))),
}
SHAPES_OF_DTYPES = [
    *((np.float32, shape) for shape in [(), (7,), (3, 4)]),
    *((dtype, (7,)) for dtype in [np.float16, BFLOAT16, np.int32, np.int8]),
]


@pytest.mark.parametrize("name", AXES_OF_TWO_STAGE)
@pytest.mark.parametrize("add", [ring_sum, hierarchical_sum, two_stage_sum])
def test_every_replica_gets_the_sum(add, name) -> None:
    axis = AXES_OF_TWO_STAGE[name]
    rng = np.random.default_rng(axis.size)
    parts = [
        rng.integers(0, 9, (axis.size, *shape)).astype(dtype) for dtype, shape in SHAPES_OF_DTYPES
    ]
    sums = on_axis(axis, lambda *own: [add(part, axis) for part in own], *parts)
    for part, total in zip(parts, sums, strict=True):
        expected = part.astype(np.int64).sum(axis=0)  # exact in all dtypes
        assert total.dtype == part.dtype
        np.testing.assert_array_equal(total.astype(np.int64), np.broadcast_to(expected, part.shape))


@pytest.mark.parametrize("name", ["2", "3", "5"])
def test_without_groups_parts_are_added_in_replica_order(name) -> None:
    axis = AXES_OF_TWO_STAGE[name]
    parts = np.random.default_rng(2).normal(size=(axis.size, 333)).astype(np.float32)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for add in (two_stage_sum, one_device_sum):
        sums = on_axis(axis, lambda part, add=add: add(part, axis), parts)
        np.testing.assert_array_equal(sums, np.broadcast_to(expected, parts.shape))


@pytest.mark.parametrize("name", ["5", "every second of 6"])
def test_sums_in_two_stages_are_rounded_alike_and_send_shards(name) -> None:
    axis = AXES_OF_TWO_STAGE[name]
    parts = np.random.default_rng(1).normal(size=(axis.size, 1001)).astype(np.float32)
    sums = on_axis(axis, lambda part: two_stage_sum(part, axis), parts)
    for own in sums[1:]:
        assert own.tobytes() == sums[0].tobytes()
    np.testing.assert_allclose(sums[0], parts.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)

    def sizes(jaxpr: Any) -> Iterator[int]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name in ("all_to_all", "psum"):
                yield eqn.invars[0].aval.size
            for inner in eqn.params.values():
                if isinstance(inner, ClosedJaxpr):
                    yield from sizes(inner.jaxpr)

    count = 10 if name == "5" else 12
    for add in (two_stage_sum, hierarchical_sum):
        program = jax.make_jaxpr(
            lambda part, add=add: add(part, axis), axis_env=[(axis.name, axis.size)]
        )(np.zeros(count, np.float32))
        if axis.groups:  # only the shard of one replica leaves its group
            assert {*sizes(program.jaxpr)} == {4}


# Groups of replicas on an axis: processes, halves of a process, and slices.


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


# Concatenation over a mesh axis, with its gradient, against NumPy.

ALL = MeshCommunicator(AXES[3])


@pytest.mark.parametrize("lengths", [(2, 1, 0), (0, 0, 2), (2, 2, 2), (0, 0, 0)])
def test_all_gather_leaves_padding_out(lengths) -> None:
    parts = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    result = on_axis(AXES[3], lambda part: ALL.all_gather(part, 0, lengths), parts)
    true = np.concatenate([part[:length] for part, length in zip(parts, lengths, strict=True)])
    for gathered in result:
        np.testing.assert_array_equal(gathered, true)


def test_gradient_of_all_gather_is_the_sum_of_the_slices_of_the_own_part() -> None:
    """Replica r weighs row k of the gathered rows by 10 r + k."""
    lengths = (2, 1, 2)
    weights = 10.0 * np.arange(3)[:, None] + np.arange(5)[None, :]

    def gradient(part, weight):
        def loss(part):
            return jnp.vdot(ALL.all_gather(part, 0, lengths), weight)

        return jax.grad(loss)(part)

    result = on_axis(AXES[3], gradient, np.ones((3, 2), np.float32), weights.astype(np.float32))
    columns = weights.sum(0)  # 30, 33, 36, 39, 42
    np.testing.assert_allclose(result, [columns[:2], [columns[2], 0.0], columns[3:]], rtol=1e-6)


# Arrays joined from parts: the replication analysis takes them for sums over replicas.


def gathered(part):
    groups = [[0, 1], [2, 3]]
    return jax.lax.all_gather(part, "row", tiled=True, axis_index_groups=groups)


def test_trace_marks_the_joined_array_only() -> None:
    def step(part):
        return joined(gathered, part), gathered(part)

    traced = jax.make_jaxpr(step, axis_env=[("row", 4)])(np.ones(2, np.float32))
    assert joined(lambda part: jnp.concatenate([part, 2 * part]), jnp.ones(1)).tolist() == [1, 2]
    marks = [is_sum_over_replicas(eqn) for eqn in traced.eqns]
    assert marks == [True, False]


# The rule: an algorithm for each size and place, as the measurements have it.

SHARING = {"platform": "cpu", "spans_processes": True, "shares_memory": True}


@pytest.mark.parametrize(
    ("facts", "limits"),
    [
        ({"platform": "gpu", "spans_processes": True}, "compiler"),
        ({"platform": "tpu"}, "compiler"),
        ({"platform": "tpu", "num_slices": 2}, "compiler 4096 hierarchical"),
        ({"platform": "cpu"}, "compiler"),
        ({"platform": "cpu", "spans_processes": True}, "to one device 262144 compiler"),
        ({"platform": "cpu", "spans_processes": True, "num_replicas": 5}, "compiler"),
        (SHARING, "to one device 32768 shared memory"),
        ({**SHARING, "num_replicas": 8}, "compiler 32768 shared memory"),
    ],
)
def test_rule_follows_from_the_place_of_the_replicas(facts, limits) -> None:
    def rule(size: int) -> str:
        return algorithm_for(size, **{"num_replicas": 4, **facts}).value

    sizes = [0, 4, *(2**power + more for power in range(10, 31) for more in (0, 1))]
    shown = [rule(0)]
    for below, size in itertools.pairwise(sizes):
        if rule(below) != rule(size):
            shown += [str(below), rule(size)]
    assert " ".join(shown) == limits


# Packing of arrays into messages.


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30),
    st.integers(1, 120),
    st.integers(1, 200),
)
def test_every_array_travels_once_and_no_pack_is_too_large(arrays, max_array, pack) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = SizedPacks(max_array, pack).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for places in packs:
        assert len({kinds[place] for place in places}) == 1
        if len(places) > 1:
            assert all(sizes[place] <= max_array for place in places)
            assert sum(sizes[place] for place in places) <= pack


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.tuples(st.integers(0, 100), st.sampled_from("fi")), max_size=30), st.integers(1, 5)
)
def test_numbered_packs_hold_neighbours_and_are_of_about_one_size(arrays, num_packs) -> None:
    sizes, kinds = [size for size, _ in arrays], [kind for _, kind in arrays]
    packs = NumberedPacks(num_packs).packs(sizes, kinds)
    assert sorted(place for places in packs for place in places) == list(range(len(arrays)))
    for kind in set(kinds):
        of_kind = [places for places in packs if kinds[places[0]] == kind]
        assert len(of_kind) <= num_packs
        assert [place for places in of_kind for place in places] == [
            place for place, other in enumerate(kinds) if other == kind
        ]
        share = sum(size for size, other in arrays if other == kind) / num_packs
        largest = max(size for size, other in arrays if other == kind)
        assert all(sum(sizes[place] for place in places) <= share + largest for places in of_kind)


def test_packing_follows_the_platform_the_processes_and_the_option() -> None:
    assert packing_for("gpu", spans_processes=True, bytes_per_pack=100) == NO_PACKING
    assert packing_for("cpu", spans_processes=False, bytes_per_pack=100) == WITHIN_PROCESS
    assert packing_for("cpu", spans_processes=True, bytes_per_pack=100) == SizedPacks(100, 100)
    chosen = packing_for("cpu", spans_processes=True, bytes_per_pack=0)
    assert chosen == SizedPacks(2**18, 2**18)
    few = SizedPacks(max_array_bytes=10, pack_bytes=100, max_num_arrays=2)
    sizes, kinds = [1, 2, 3, 4, 50, 5], ["f", "f", "i", "f", "i", "i"]
    assert sorted(few.packs(sizes, kinds)) == [[0], [1], [2, 5], [3], [4]]  # many are sent alone


# All-reduce with bfloat16 messages: its error, its gradients and the size of its messages.


@pytest.mark.parametrize("count", [2, 3, 6])
def test_bfloat16_is_off_by_no_more_than_is_stated_and_the_same_everywhere(count) -> None:
    axis = AXES[count]
    rng = np.random.default_rng(0)
    parts = (rng.normal(size=(count, 1001)) * 10.0 ** rng.integers(-3, 4, 1001)).astype(np.float32)
    reduction = MeshCommunicator(axis, packing=NumberedPacks(1), in_bfloat16=True)
    got = on_axis(axis, lambda part: reduction.all_reduce_many(ReduceOp.SUM, [part])[0], parts)
    np.testing.assert_array_equal(got, [got[0]] * count)
    exact = parts.astype(np.float64)
    bound = 2.0**-8 * (np.abs(exact).sum(0) + np.abs(exact.sum(0)))
    error = np.abs(got[0] - exact.sum(0))
    assert np.all(error <= bound * 1.01)
    assert error.max() > 0
    at_hand = reduction.parts(ReduceOp.SUM, list(parts), are_gradients=True)
    np.testing.assert_array_equal(at_hand, got[0])


def test_bfloat16_is_for_gradients_of_float32_and_halves_their_messages() -> None:
    reduction = MeshCommunicator(AXES[2], in_bfloat16=True)
    parts = np.array([[1.0], [2.0**-10]], np.float32)
    single = on_axis(AXES[2], lambda part: reduction.all_reduce(ReduceOp.SUM, part), parts)
    np.testing.assert_array_equal(single, [[1.0 + 2.0**-10]] * 2)
    assert float(reduction.parts(ReduceOp.SUM, list(parts), are_gradients=False)[0]) > 1
    assert messages(reduction, np.ones(3, np.int32)) == ["psum"]
    assert messages(reduction, np.ones(3, np.float32)) == ["all_to_all", "all_gather"]
    mesh = Mesh(np.array(jax.devices()[:2]), ("row",))
    spec = PartitionSpec("row")
    mapped = jax.shard_map(
        lambda part: reduction.all_reduce_many(ReduceOp.SUM, [part[0]])[0][None],
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
        lambda x: MeshCommunicator(axis).all_reduce(ReduceOp.SUM, x),
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
