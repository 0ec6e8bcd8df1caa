"""Sums of every scheme: equal on all replicas, and nothing is lost that feedback should keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.collectives import ChosenAllReduce, MeshCommunicator, SoleCommunicator
from stratagem.collectives.compressed.sums import compressed_sums
from stratagem.compression import BFloat16, Float8, Float16, Int8, PowerSGD, TopK
from tests.collectives.axes import AXES, on_axis

SHAPES = [(40, 30), (3, 3, 5, 7), (17, 64)]
ALL = [BFloat16(), Float16(), Int8(), Int8(stochastic=False), Float8(), PowerSGD(rank=2), TopK()]


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
    communicator = MeshCommunicator(ChosenAllReduce(axis))

    def replica(grads, states):
        return compressed_sums(
            setting,
            grads,
            states,
            communicator,
            replica_id=jax.lax.axis_index(axis.name),
            step=step,
        )

    return on_axis(axis, replica, grads, states)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("setting", ALL, ids=str)
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


@pytest.mark.parametrize(
    ("setting", "bound"),
    [(BFloat16(), 0.01), (Float16(), 0.002), (Int8(), 0.03), (Float8(), 0.1)],
    ids=str,
)
def test_short_numbers_are_close(setting, bound) -> None:
    grads = gradients(2)
    sums, _ = one_step(setting, 2, grads, first_states(setting, 2))
    for got, grad in zip(sums, grads, strict=True):
        exact = grad.sum(0)
        assert np.abs(got[0] - exact).max() <= bound * np.abs(exact).max()


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


def test_factors_of_repeated_gradients_become_the_best_ones() -> None:
    """Power iteration with a warm start finds the singular vectors, which SVD finds at once."""
    setting = PowerSGD(rank=2, error_feedback=False)
    grads, states = gradients(2), first_states(setting, 2)
    for _ in range(60):
        sums, states = one_step(setting, 2, grads, states)
    whole = grads[0].sum(0)
    left, values, right = np.linalg.svd(whole, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    np.testing.assert_allclose(sums[0][0], best, atol=0.02 * values[0])


def test_largest_elements_are_those_that_numpy_finds() -> None:
    setting = TopK(fraction=0.1)
    grads = gradients(3)
    sums, states = one_step(setting, 3, grads, first_states(setting, 3))
    for got, grad, state in zip(sums, grads, states, strict=True):
        flat = grad.reshape(3, -1)
        sent = np.zeros_like(flat)
        for own, part in zip(sent, flat, strict=True):
            places = np.argsort(-np.abs(part))[: flat.shape[1] // 10]
            own[places] = part[places]
        np.testing.assert_allclose(got[0].ravel(), sent.sum(0), rtol=1e-6)
        np.testing.assert_array_equal(state["error"].reshape(3, -1), flat - sent)


def test_rounding_by_chance_differs_from_step_to_step_and_repeats() -> None:
    grads, states = gradients(2), first_states(Int8(), 2)
    first, again, later = (one_step(Int8(), 2, grads, states, step)[0][0] for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != later)


@pytest.mark.parametrize("setting", ALL, ids=str)
def test_dtype_of_gradients_is_kept(setting) -> None:
    grads = [jnp.ones((40, 30), jnp.bfloat16)]
    state = {name: jnp.ones(size) for name, size in setting.state_shapes((40, 30)).items()}
    sums, _ = compressed_sums(setting, grads, [state], SoleCommunicator(), replica_id=0, step=0)
    assert sums[0].dtype == jnp.bfloat16
