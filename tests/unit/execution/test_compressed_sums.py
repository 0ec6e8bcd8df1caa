"""Compressed sums, against NumPy, ml_dtypes, and what no scheme may lose; sums between islands."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import stratagem as sg
from stratagem.devices.all_reduce import NO_PACKING, ReplicaAxis, SizedPacks
from stratagem.devices.compression import BFloat16, Float8, Float16, Int8, PowerSGD
from stratagem.devices.local_updates import Islands
from stratagem.execution.communicator import (
    IslandSums,
    MeshCommunicator,
    SoleCommunicator,
    compressed_between,
    compressed_sums,
    decode,
    encode,
)
from stratagem.options import ReduceOp
from tests.marks import slow
from tests.unit.devices.axes import AXES, on_axis

# Gradients of some shapes, and a compressed step on several devices.

SHAPES = [(40, 30), (3, 3, 5, 7), (17, 64)]


def gradients(count, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.normal(size=(count, *shape)).astype(np.float32) for shape in SHAPES]


def first_states(setting, count):
    rng = np.random.default_rng(1)
    states = []
    for shape in SHAPES:
        state = {
            name: np.zeros((count, *size), np.float32)
            for name, size in setting.state_shapes(shape).items()
        }
        if "factor" in state:
            factor = rng.normal(size=state["factor"].shape[1:]).astype(np.float32)
            state["factor"] = np.broadcast_to(factor, state["factor"].shape)
        states.append(state)
    return states


def one_step(setting, count, grads, states, step=0):
    axis = AXES[count]
    communicator = MeshCommunicator(axis)

    def replica(grads, states):
        own_id = jax.lax.axis_index(axis.name)
        return compressed_sums(setting, grads, states, communicator, replica_id=own_id, step=step)

    return on_axis(axis, replica, grads, states)


# Coding of rows as bytes, against casts of NumPy and ml_dtypes.

ROWS = (np.random.default_rng(0).normal(size=(3, 1000)) * np.logspace(-3, 2, 1000)).astype(
    np.float32
)


def coded(setting, rows, seed=0):
    payload = encode(setting, jnp.asarray(rows), jax.random.key(seed))
    assert payload.dtype == jnp.uint8
    assert payload.shape[1] == setting.number_bytes(rows.shape[1])
    return np.asarray(decode(setting, payload, rows.shape[1]))


def in_blocks(rows, width, largest):
    """Returns the rows in blocks, and the scale of each block."""
    padded = np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(len(rows), -1, width)
    scales = np.abs(padded).max(-1, keepdims=True) / np.float32(largest)
    return padded, scales


@pytest.mark.parametrize(
    ("setting", "dtype"), [(BFloat16(), ml_dtypes.bfloat16), (Float16(), np.float16)]
)
def test_short_floats_are_those_of_numpy(setting, dtype) -> None:
    np.testing.assert_array_equal(coded(setting, ROWS), ROWS.astype(dtype).astype(np.float32))
    rows = np.float32([[1e6, -1e6, 3.0]])  # float16 cuts what it cannot hold
    cut = [[65504, -65504, 3]] if dtype is np.float16 else rows.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(coded(setting, rows), cut)


def test_int8_is_within_half_a_step_and_float8_that_of_ml_dtypes() -> None:
    blocks, scales = in_blocks(ROWS, 64, 127)
    expected = (np.round(blocks / scales) * scales).reshape(3, -1)[:, :1000]
    setting = Int8(block_elements=64, stochastic=False)
    np.testing.assert_allclose(coded(setting, ROWS), expected, rtol=1e-6, atol=1e-7)
    blocks, scales = in_blocks(ROWS, 64, 448)
    short = (blocks / scales).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = (short * scales).reshape(3, -1)[:, :1000]
    setting = Float8(block_elements=64, stochastic=False)
    np.testing.assert_allclose(coded(setting, ROWS), expected, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Int8, Float8])
def test_stochastic_rounding_takes_a_neighbor_and_is_right_on_average(kind) -> None:
    rows, num_draws = ROWS[:1, :200], 400
    nearest = kind(stochastic=False)
    draws = np.stack([coded(kind(), rows, seed) for seed in range(num_draws)])
    _, scales = in_blocks(rows, 200, 127 if kind is Int8 else 448)
    scale = float(scales.max())
    scaled = np.abs(rows) / scale
    # The distance of neighbors: one for integers, and for floats an eighth of the power of two.
    step = 1.0 if kind is Int8 else 2.0 ** np.maximum(np.floor(np.log2(scaled)) - 3, -9)
    assert np.all(np.abs(draws - rows) <= 1.001 * step * scale)
    assert np.any(draws != coded(nearest, rows))
    error = np.abs(draws.mean(0) - rows)
    assert np.all(error <= 5 * step * scale / 2 / np.sqrt(num_draws))


@pytest.mark.parametrize("setting", [Float16(), slow(BFloat16()), slow(Int8()), slow(Float8())])
def test_zeros_and_short_rows_come_back(setting) -> None:
    rows = np.float32([[0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(coded(setting, rows), rows)
    np.testing.assert_array_equal(coded(setting, np.float32([[2.0]])), [[2.0]])


# Compressed sums between islands: equal everywhere, and nothing is lost.

ALL = [BFloat16(), Int8(), Int8(error_feedback=False), Float8(), PowerSGD(rank=2)]


@pytest.mark.parametrize(
    ("setting", "count", "size"),
    [
        (BFloat16(), 4, 2),
        *(slow(setting, 4, 2) for setting in ALL[1:]),
        slow(Int8(), 6, 3),
        slow(Int8(), 2, 1),
    ],
    ids=str,
)
def test_sums_and_errors_of_islands_add_up(setting, count, size) -> None:
    axis, islands = ReplicaAxis("row", count), Islands(count, size)

    def replica(step):
        def body(arrays, states):
            communicator = MeshCommunicator(axis)
            sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))
            return compressed_between(setting, arrays, states, sums, step=step)

        return body

    states = first_states(setting, count)
    for step in range(2):
        arrays = gradients(islands.count, step)
        own = [np.repeat(one, size, 0) for one in arrays]
        sums, news = on_axis(axis, replica(step), own, states)
        for got, array, state, new in zip(sums, arrays, states, news, strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
            if "factor" in new:
                whole = np.broadcast_to(new["factor"][0], new["factor"].shape)
                np.testing.assert_array_equal(new["factor"], whole)
            if not setting.error_feedback:
                np.testing.assert_allclose(got[0], array.sum(0), atol=0.1)
                continue
            # The errors of all replicas add up to what no island has sent.
            given = array.astype(np.float64).sum(0) + state["error"].sum(0)
            np.testing.assert_allclose(got[0] + new["error"].sum(0), given, rtol=0, atol=3e-5)
            for island in range(islands.count):
                parts = new["error"][island * size : (island + 1) * size]
                np.testing.assert_array_equal(parts, np.stack([parts[0]] * size))
                assert np.abs(parts).max() > 0
        states = news


# Sums of every scheme: equal on all replicas, and nothing is lost that feedback should keep.


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        (BFloat16(), 2),
        (Int8(), 2),
        *(slow(one, 3) for one in (Float16(), Int8(stochastic=False), Float8(), PowerSGD(rank=2))),
    ],
    ids=str,
)
def test_sums_and_errors_add_up_to_the_gradients(setting, count) -> None:
    """What a step does not send is in the errors, so that in the end all of it is sent."""
    states = first_states(setting, count)
    for step in range(3):
        grads = gradients(count, step)
        sums, new_states = one_step(setting, count, grads, states, step)
        for got, grad, state, new in zip(sums, grads, states, new_states, strict=True):
            np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape))
            given = (grad + state["error"]).astype(np.float64).sum(0)
            np.testing.assert_allclose(got[0] + new["error"].sum(0), given, rtol=0, atol=2e-5)
            assert np.abs(new["error"]).max() > 0
        states = new_states
    grads = [jnp.ones((40, 30), jnp.bfloat16)]
    state = {name: jnp.ones(size) for name, size in setting.state_shapes((40, 30)).items()}
    sums, _ = compressed_sums(setting, grads, [state], SoleCommunicator(), replica_id=0, step=0)
    assert sums[0].dtype == jnp.bfloat16  # that of the gradients


# Low-rank sums, against the paper's algorithm in NumPy.


def test_low_rank_is_that_of_the_paper() -> None:
    """Algorithm 1 in float64, with another way to orthogonalize."""
    setting = PowerSGD(rank=2)
    grads, states = gradients(3), first_states(setting, 3)
    sums, new_states = one_step(setting, 3, grads, states)
    for got, grad, state, new in zip(sums, grads, states, new_states, strict=True):
        matrices = grad.reshape(3, -1, grad.shape[-1]).astype(np.float64)
        product = sum(matrix @ state["factor"][0] for matrix in matrices)
        basis = np.linalg.svd(product, full_matrices=False)[0]
        expected = basis @ sum(matrix.T @ basis for matrix in matrices).T
        np.testing.assert_allclose(got[0].reshape(expected.shape), expected, atol=2e-5)
        own = matrices[1] - basis @ (matrices[1].T @ basis).T
        np.testing.assert_allclose(new["error"][1].reshape(own.shape), own, atol=2e-5)
        np.testing.assert_array_equal(new["factor"], [new["factor"][0]] * 3)


# Islands: their replicas, and sums between them of which each replica sends a part.

ODD_SHAPES = [(5, 3), (), (8,), (0,)]  # of a size that islands do not divide, too


@pytest.mark.parametrize("packing", [NO_PACKING, SizedPacks(40, 40)])
@pytest.mark.parametrize(("count", "size"), [(6, 2), (3, 1), (4, 4)])
def test_sums_are_those_of_one_array_per_island(count, size, packing) -> None:
    axis, islands = ReplicaAxis("row", count), Islands(count, size)
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(islands.count, *shape)).astype("float32") for shape in ODD_SHAPES]
    own = [np.repeat(array, size, 0) for array in arrays]  # equal on the replicas of an island

    def replica(*values):
        communicator = MeshCommunicator(axis, packing=packing)
        sums = IslandSums(islands, communicator, jax.lax.axis_index("row"))

        def add(parts):
            sizes.append([part.size for part in parts])
            return sums.between.all_reduce_many(ReduceOp.SUM, parts)

        return sums.by_parts(add, values), sums.sent_equal(values[0]), sums.island_id

    sizes: list[list[int]] = []

    totals, of_place, ids = on_axis(axis, replica, *own)
    for total, array in zip(totals, arrays, strict=True):
        np.testing.assert_array_equal(total, np.broadcast_to(total[0], total.shape))
        np.testing.assert_allclose(total[0], array.sum(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(of_place, own[0])
    np.testing.assert_array_equal(ids, np.arange(count) // size)
    # A link between islands carries an array once, whatever the replicas of an island.
    wholes = [int(np.prod(shape)) for shape in ODD_SHAPES]
    assert all(sum(one) < sum(wholes) / size + size * len(wholes) for one in sizes)


# Communicators of a mesh: sums among groups, and objects that no replica can be given.


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
