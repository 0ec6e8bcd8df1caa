"""Rounds of a compiled program, of a single member; several are in tests/multiprocess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.devices import elastic_rounds
from stratagem.devices.elastic_rounds import RoundOperation, Rounds, serve_rounds
from stratagem.group.elastic.group import ElasticGroup
from tests.unit.group.elastic.members import Cluster


@pytest.fixture
def group_of_elastic_rounds() -> Iterator[ElasticGroup]:
    with Cluster(free_ports(1)) as cluster:
        (member,) = cluster.started(1)
        serve_rounds(member)
        yield member


def _all_operations(x: Any) -> Any:
    rounds = Rounds()
    total = rounds.combine(RoundOperation.SUM, x)
    largest = rounds.combine(RoundOperation.MAX, total)
    smallest = rounds.combine(RoundOperation.MIN, largest)
    rows = rounds.gather(smallest, 1)
    swapped = rounds.all_to_all(rows)
    return swapped, rounds.commit()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_operations_run_in_order_and_keep_dtypes(group_of_elastic_rounds, dtype) -> None:
    x = jnp.asarray([[0, 1], [1, 0]], dtype)
    for number in (1, 2):
        group_of_elastic_rounds.begin_round("step")
        result, is_committed = jax.jit(_all_operations)(x)
        assert bool(is_committed)
        assert result.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(result[0]), np.asarray(x))
        assert group_of_elastic_rounds._num_rounds == number


def test_denormal_numbers_are_zero_after_an_operation_as_before_it(group_of_elastic_rounds) -> None:
    """A program continues in a thread of ours, which must compute as one of XLA's does."""
    x = jnp.full(1000, 2e-38)

    @jax.jit
    def step(x: Any) -> Any:
        rounds = Rounds()
        total = rounds.combine(RoundOperation.SUM, x)
        return x * 0.01, total * 0.01, jnp.where(rounds.commit(), total, x) * 0.01

    for _ in range(20):
        group_of_elastic_rounds.begin_round("step")
        np.testing.assert_array_equal(step(x), np.zeros((3, 1000)))


def test_a_broken_round_ends_with_zeros_and_is_not_committed(
    group_of_elastic_rounds, monkeypatch
) -> None:
    monkeypatch.setattr(group_of_elastic_rounds, "operate", lambda *arguments: False)
    monkeypatch.setattr(group_of_elastic_rounds, "commit", lambda: False)
    result, is_committed = jax.jit(_all_operations)(jnp.ones((2, 2)))
    assert not bool(is_committed)
    assert not np.asarray(result).any()


def test_an_error_of_the_group_ends_the_program(group_of_elastic_rounds, monkeypatch) -> None:
    def fail(*arguments: object) -> bool:
        raise ValueError("no such operation")

    monkeypatch.setattr(group_of_elastic_rounds, "operate", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no such operation"):
        jax.block_until_ready(jax.jit(_all_operations)(jnp.ones((2, 2))))
    assert isinstance(elastic_rounds.error_of_rounds(), ValueError)
    assert elastic_rounds.error_of_rounds() is None


def test_a_version_without_handlers_is_refused(group_of_elastic_rounds, monkeypatch) -> None:
    monkeypatch.setattr(elastic_rounds, "handlers_work", lambda: False)
    with pytest.raises(RuntimeError, match="does not call handlers as expected"):
        serve_rounds(group_of_elastic_rounds)
