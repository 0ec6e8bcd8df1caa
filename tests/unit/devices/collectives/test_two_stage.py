"""Two-stage all-reduce against NumPy: alone and in groups, equal on all replicas, two messages."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr

from stratagem.devices.collectives.all_reduce import one_device_sum, two_stage_sum
from stratagem.devices.collectives.axis import ReplicaAxis
from tests.unit.devices.collectives.axes import on_axis

AXES = {
    "2": ReplicaAxis("row", 2),
    "3": ReplicaAxis("row", 3),
    "5": ReplicaAxis("row", 5),
    "halves of 4": ReplicaAxis("row", 4, ((0, 1), (2, 3))),
    "pairs of 6": ReplicaAxis("row", 6, ((0, 1), (2, 3), (4, 5))),
    "every second of 6": ReplicaAxis("row", 6, ((0, 2, 4), (1, 3, 5))),
}
DTYPES = (np.float32, np.float16, np.dtype(ml_dtypes.bfloat16), np.int32, np.int8, np.uint8)


@pytest.mark.parametrize("name", AXES)
@pytest.mark.parametrize(
    "shape",
    [(), (3, 5), *(pytest.param(shape, marks=pytest.mark.slow) for shape in [(1,), (7,), (12,)])],
)
def test_every_replica_gets_the_sum(name, shape) -> None:
    axis = AXES[name]
    numbers = np.random.default_rng(axis.size).integers(0, 9, (axis.size, *shape))
    parts = {str(np.dtype(dtype)): numbers.astype(dtype) for dtype in DTYPES}
    sums = on_axis(
        axis, lambda own: {key: two_stage_sum(part, axis) for key, part in own.items()}, parts
    )
    for key, total in sums.items():
        expected = np.broadcast_to(numbers.sum(axis=0), numbers.shape)  # exact in all dtypes
        assert total.dtype == parts[key].dtype
        np.testing.assert_array_equal(total.astype(np.int64), expected)


@pytest.mark.parametrize("name", AXES)
def test_rounded_sums_are_equal_bit_for_bit_on_all_replicas(name) -> None:
    axis = AXES[name]
    parts = np.random.default_rng(1).normal(size=(axis.size, 1001)).astype(np.float32)
    sums = on_axis(axis, lambda part: two_stage_sum(part, axis), parts)
    for own in sums[1:]:
        assert own.tobytes() == sums[0].tobytes()
    np.testing.assert_allclose(sums[0], parts.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["2", "3", "5"])
def test_without_groups_parts_are_added_in_replica_order(name) -> None:
    axis = AXES[name]
    parts = np.random.default_rng(2).normal(size=(axis.size, 333)).astype(np.float32)
    expected = parts[0]
    for part in parts[1:]:
        expected = expected + part
    for add in (two_stage_sum, one_device_sum):
        sums = on_axis(axis, lambda part, add=add: add(part, axis), parts)
        np.testing.assert_array_equal(sums, np.broadcast_to(expected, parts.shape))


@pytest.mark.parametrize("name", AXES)
def test_gradient_is_the_sum_of_the_incoming_ones(name) -> None:
    axis = AXES[name]
    incoming = np.random.default_rng(3).integers(-9, 9, (axis.size, 7)).astype(np.float32)

    def gradient(value, incoming):
        return jax.vjp(lambda x: two_stage_sum(x, axis), value)[1](incoming)[0]

    got = on_axis(axis, gradient, np.zeros_like(incoming), incoming)
    np.testing.assert_array_equal(got, np.broadcast_to(incoming.sum(axis=0), incoming.shape))


@pytest.mark.parametrize(("name", "sent"), [("5", 10), ("every second of 6", 4)])
def test_two_messages_with_the_shards_of_a_replica(name, sent) -> None:
    axis = AXES[name]
    program = jax.make_jaxpr(
        lambda part: two_stage_sum(part, axis), axis_env=[(axis.name, axis.size)]
    )

    def sizes(jaxpr) -> Iterator[int]:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "all_to_all":
                yield eqn.invars[0].aval.size
            for inner in eqn.params.values():
                if isinstance(inner, ClosedJaxpr):
                    yield from sizes(inner.jaxpr)

    assert [*sizes(program(np.zeros(10, np.float32)).jaxpr)] == [sent, sent]
