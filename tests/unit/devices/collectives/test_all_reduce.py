"""Sums and means over replicas by each algorithm, with their gradients, against NumPy."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stratagem.devices.collectives.all_reduce import ChosenAllReduce, GatheredAllReduce
from stratagem.devices.collectives.choice import Algorithm, Choice
from stratagem.devices.collectives.packing import NO_PACKING, WITHIN_PROCESS, NumberedPacks
from stratagem.options import ReduceOp
from tests.unit.devices.collectives.axes import AXES, messages, on_axis

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
