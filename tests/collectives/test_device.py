"""Sums, means and concatenations over a mesh axis, with their gradients, against NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from stratagem.collectives import WITHIN_PROCESS, device
from stratagem.options import ReduceOp
from tests.collectives.replicas import AXIS, NUM_REPLICAS, on_replicas

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PARTS = {
    "float32": np.array([[1.5, -2.0], [3.0, 0.25], [7.0, 7.0]], np.float32),
    "float16": np.array([[1.5, -2.0], [3.0, 0.25], [7.0, 7.0]], np.float16),
    "bfloat16": np.array([[1.5, -2.0], [3.0, 0.25], [7.0, 7.0]], BFLOAT16),
    "int32": np.array([[1, -2], [3, 5], [7, 7]], np.int32),
    "int8": np.array([[1, -2], [3, 5], [7, 7]], np.int8),
    "bool": np.array([[True, False], [True, False], [False, False]]),
    "scalar": np.array([1.0, 2.0, 4.0], np.float32),
    "empty": np.zeros((3, 0), np.float32),
}
SUM_DTYPES = {"bool": np.int32, "scalar": np.float32, "empty": np.float32, "bfloat16": BFLOAT16}
MEAN_DTYPES = {"float16": np.float16, "bfloat16": BFLOAT16}


def test_all_reduce_gives_every_replica_the_sum_and_the_mean(tolerance) -> None:
    def reduce(parts):
        def reduced(op):
            return jax.tree.map(lambda part: device.all_reduce(op, part, AXIS), parts)

        return {"SUM": reduced(ReduceOp.SUM), "MEAN": reduced(ReduceOp.MEAN)}

    result = on_replicas(reduce, PARTS)
    for name, parts in PARTS.items():
        exact = parts.astype(np.float64)
        total, mean = result["SUM"][name], result["MEAN"][name]
        assert total.dtype == np.dtype(SUM_DTYPES.get(name, name))
        assert mean.dtype == MEAN_DTYPES.get(name, np.float32)
        for replica in range(NUM_REPLICAS):
            np.testing.assert_array_equal(total[replica].astype(np.float64), exact.sum(0))
            np.testing.assert_allclose(
                mean[replica].astype(np.float64), exact.mean(0), **tolerance(mean.dtype)
            )


def test_packed_reduction_gives_what_single_ones_give_in_fewer_messages() -> None:
    large = np.arange(3 * 20_000, dtype=np.float32).reshape(3, 100, 200)
    parts = [*PARTS.values(), np.ones((3, 2, 1), np.float32), large]

    def both(parts):
        packed = device.all_reduce_packed(ReduceOp.MEAN, parts, AXIS, WITHIN_PROCESS)
        return packed, [device.all_reduce(ReduceOp.MEAN, part, AXIS) for part in parts]

    packed, single = on_replicas(both, parts)
    for got, expected in zip(packed, single, strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)

    def messages(parts):
        reduce = lambda parts: device.all_reduce_packed(  # noqa: E731
            ReduceOp.SUM, parts, AXIS, WITHIN_PROCESS
        )
        program = jax.make_jaxpr(reduce, axis_env=[(AXIS, 3)])(parts)
        return sum(equation.primitive.name.startswith("psum") for equation in program.eqns)

    of_one = [part[0] for part in parts]
    dtypes = {part.dtype for part in of_one}
    assert messages(of_one) == len(dtypes) + 1
    assert messages(of_one[:1]) == 1


@pytest.mark.parametrize(("op", "expected"), [("SUM", 14.0), ("MEAN", 14.0 / 3.0)])
def test_gradient_of_all_reduce_is_the_same_reduction_of_the_incoming_ones(op, expected) -> None:
    """Incoming [2. | 5. | 7.]."""

    def gradient(value, incoming):
        _, pull = jax.vjp(lambda x: device.all_reduce(ReduceOp[op], x, AXIS), value)
        return pull(incoming)[0]

    incoming = np.array([2.0, 5.0, 7.0], np.float32)
    result = on_replicas(gradient, np.zeros(3, np.float32), incoming)
    np.testing.assert_allclose(result, [expected] * 3, rtol=1e-6)


@pytest.mark.parametrize("axis", [0, 1])
def test_all_gather_concatenates_in_replica_order(axis) -> None:
    parts = np.arange(18, dtype=np.int32).reshape(3, 2, 3)
    result = on_replicas(lambda part: device.all_gather(part, axis, AXIS, None), parts)
    for gathered in result:
        np.testing.assert_array_equal(gathered, np.concatenate(list(parts), axis=axis))


@pytest.mark.parametrize("lengths", [(2, 1, 0), (0, 0, 2), (2, 2, 2), (0, 0, 0)])
def test_all_gather_leaves_padding_out(lengths) -> None:
    parts = np.arange(12, dtype=np.float32).reshape(3, 2, 2)
    result = on_replicas(lambda part: device.all_gather(part, 0, AXIS, lengths), parts)
    true = np.concatenate([part[:length] for part, length in zip(parts, lengths, strict=True)])
    for gathered in result:
        np.testing.assert_array_equal(gathered, true)


def test_gradient_of_all_gather_is_the_sum_of_the_slices_of_the_own_part() -> None:
    """Replica r weighs row k of the gathered rows by 10 r + k."""
    lengths = (2, 1, 2)
    weights = 10.0 * np.arange(3)[:, None] + np.arange(5)[None, :]

    def gradient(part, weight):
        def loss(part):
            return jnp.vdot(device.all_gather(part, 0, AXIS, lengths), weight)

        return jax.grad(loss)(part)

    result = on_replicas(gradient, np.ones((3, 2), np.float32), weights.astype(np.float32))
    columns = weights.sum(0)  # 30, 33, 36, 39, 42
    np.testing.assert_allclose(result, [columns[:2], [columns[2], 0.0], columns[3:]], rtol=1e-6)
