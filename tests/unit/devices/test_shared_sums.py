"""Sums in shared memory within compiled programs, between devices of one process."""

from __future__ import annotations

import errno
import functools
import logging
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices import shared_sums
from stratagem.devices.all_reduce import Algorithm, ReplicaAxis
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.devices.shared_sums import in_order, is_connected, is_supported, no_sums
from stratagem.execution.communicator import MeshCommunicator
from stratagem.options import ReduceOp
from tests.unit.devices import sharing

pytestmark = pytest.mark.skipif(not is_supported(), reason="memory is shared on Linux on x86-64")

AXIS = ReplicaAxis(REPLICA_AXIS, 2)
SHARED = MeshCommunicator(AXIS, Algorithm.SHARED_MEMORY)


@pytest.fixture
def served() -> Iterator[None]:
    with sharing.served(2):
        yield


def traced(step: Any, *parts: Any) -> Any:
    return jax.make_jaxpr(step, axis_env=[(REPLICA_AXIS, 2)])(*parts)


def run(step: Any, *parts: Any) -> tuple[Any, int]:
    """Runs a step with its sums in order; axis 0 of parts and results is the replicas.

    Also returns the number of sums that its program has in shared memory.
    """
    ordered = in_order(traced(step, *(part[0] for part in parts)))
    assert ordered is not None

    def body(*local: Any) -> Any:
        *results, _ = jaxpr_as_fun(ordered)(*(part[0] for part in local), no_sums())
        return [result[None] for result in results]

    mesh = Mesh(np.array(jax.devices()[:2]), (REPLICA_AXIS,))
    spec = PartitionSpec(REPLICA_AXIS)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    program = jax.jit(mapped).lower(*parts)
    return program.compile()(*parts), program.as_text().count(f"call @{shared_sums._TARGET}(")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "int8", "bool"])
def test_sums_and_means_of_every_dtype(served, dtype) -> None:
    parts = (jnp.arange(2 * 700).reshape(2, 7, 100) % 5).astype(dtype)
    results, _ = run(lambda part: [SHARED.all_reduce(op, part) for op in ReduceOp], parts)
    for op, result in zip(ReduceOp, results, strict=True):
        plain = MeshCommunicator(AXIS).parts(op, list(parts), are_gradients=False)
        assert result.dtype == plain.dtype
        for replica in range(2):
            np.testing.assert_array_equal(result[replica], plain)


def test_denormal_numbers_are_zero_after_a_sum_as_before_it(served) -> None:
    """A program continues in a thread of ours, which must compute as one of XLA's does."""
    parts = np.full((2, 1000), 2e-38, "float32")

    def step(part: Any) -> Any:
        total = SHARED.all_reduce(ReduceOp.SUM, part)
        return jnp.stack([part * 0.01, total * 0.01, SHARED.all_reduce(ReduceOp.SUM, total) * 0.01])

    np.testing.assert_array_equal(jax.jit(lambda part: part * 0.01)(parts), 0.0)
    for _ in range(3):
        [result], _ = run(step, parts)
        np.testing.assert_array_equal(result, 0.0)


def test_the_gradient_of_a_sum_is_the_sum_of_the_gradients(served) -> None:
    parts = np.float32([[1.0, 2.0], [3.0, 5.0]])

    def loss(part: Any) -> Any:
        return jnp.sum(SHARED.all_reduce(ReduceOp.SUM, part) ** 2)

    [gradient], _ = run(lambda part: SHARED.all_reduce(ReduceOp.SUM, jax.grad(loss)(part)), parts)
    # Each replica's gradient is the sum over replicas of twice the total.
    np.testing.assert_allclose(gradient, np.broadcast_to(8 * parts.sum(0), (2, 2)), rtol=1e-6)


def test_sums_in_loops_are_of_the_other_algorithm() -> None:
    def step(part: Any) -> Any:
        return jax.lax.fori_loop(0, 3, lambda _, x: SHARED.all_reduce(ReduceOp.SUM, x), part)

    assert in_order(traced(step, np.ones(3, "f"))) is None
    assert in_order(traced(lambda part: part * 2, np.ones(3, "f"))) is None
    unknown = np.ones(3, "f").astype(jnp.float8_e4m3fn)  # which no handler can read
    assert in_order(traced(functools.partial(SHARED.all_reduce, ReduceOp.SUM), unknown)) is None

    def ring(size_bytes: int, *, shares_memory: bool = True) -> Algorithm:
        return Algorithm.SHARED_MEMORY if shares_memory else Algorithm.RING

    reduction = MeshCommunicator(AXIS, ring)
    text = str(traced(functools.partial(reduction.all_reduce, ReduceOp.SUM), np.ones(3, "f")))
    assert "ppermute" in text
    assert "psum" not in text


@pytest.mark.parametrize(("largest", "num_shared"), [(300, 3), (200, 0)])
def test_small_arrays_are_shared_beside_a_large_one(served, largest, num_shared) -> None:
    """A step with sums of two kinds takes longer than one with either."""

    def rule(size_bytes: int, *, shares_memory: bool = True) -> Algorithm:
        is_large = size_bytes > 1000 and shares_memory
        return Algorithm.SHARED_MEMORY if is_large else Algorithm.TO_ONE_DEVICE

    parts = [np.ones((2, size), kind) for size, kind in [(9, "f"), (largest, "f"), (9, "int32")]]

    def step(*local: Any) -> Any:
        return MeshCommunicator(AXIS, rule).all_reduce_many(ReduceOp.SUM, list(local))

    assert (in_order(traced(step, *(part[0] for part in parts))) is not None) == bool(num_shared)
    if num_shared:
        results, count = run(step, *parts)
        assert count == num_shared
        for part, result in zip(parts, results, strict=True):
            np.testing.assert_array_equal(result, 2 * part)


class Group:
    """A group of two whose other process gives certain answers."""

    process_id = 0
    verdict = None

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def exchange(self, name: str, value: Any) -> list[Any]:
        return [value, self.answers.get(name.split()[0], value)]


@pytest.mark.parametrize(
    ("answers", "is_expected"),
    [({}, True), ({"machines": "another"}, False), ({"connections": "No such file"}, False)],
)
def test_all_processes_share_memory_or_none(monkeypatch, answers, is_expected) -> None:
    monkeypatch.setattr(shared_sums, "current_group", lambda: Group(**answers))
    monkeypatch.setattr(shared_sums, "_membership", shared_sums._Membership())
    monkeypatch.setattr(shared_sums, "_servers", {})
    monkeypatch.setattr(Topology, "spans_processes", True)
    topology = Topology(tuple(jax.devices()[:2]))
    shared_sums.connect_memory(topology)
    assert is_connected(topology) is is_expected
    assert sorted(shared_sums._servers) == ([0, 1] if is_expected else [])
    assert not is_connected(Topology(tuple(jax.devices()[:3])))
    sharing.stop()


def test_without_memory_for_it_nothing_is_shared_and_the_log_says_why(monkeypatch, caplog) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    monkeypatch.setattr(shared_sums, "current_group", Group)
    monkeypatch.setattr(shared_sums, "_membership", shared_sums._Membership())
    monkeypatch.setattr(Topology, "spans_processes", True)
    topology = Topology(tuple(jax.devices()[:2]))
    with caplog.at_level(logging.INFO):
        shared_sums.connect_memory(topology)
    assert not is_connected(topology)
    assert "No space left on device" in caplog.text
