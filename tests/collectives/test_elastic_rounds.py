"""Rounds of a compiled program, of a single member; several are in tests/multiprocess."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.collectives import elastic_rounds
from stratagem.collectives.elastic_rounds import RoundOperation, Rounds, serve_rounds
from stratagem.elastic import ElasticGroup
from tests.elastic.members import started


@pytest.fixture
def group() -> Iterator[ElasticGroup]:
    (member,) = started(1)
    serve_rounds(member)
    yield member
    member.close()


def _all_operations(x: Any) -> Any:
    rounds = Rounds()
    total = rounds.combine(RoundOperation.SUM, x)
    largest = rounds.combine(RoundOperation.MAX, total)
    smallest = rounds.combine(RoundOperation.MIN, largest)
    rows = rounds.gather(smallest, 1)
    swapped = rounds.all_to_all(rows)
    return swapped, rounds.commit()[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_operations_run_in_order_and_keep_dtypes(group, dtype) -> None:
    x = jnp.asarray([[0, 1], [1, 0]], dtype)
    for number in (1, 2):
        group.begin_round("step")
        result, is_committed = jax.jit(_all_operations)(x)
        assert bool(is_committed)
        assert result.dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(np.asarray(result[0]), np.asarray(x))
        assert group._num_rounds == number


def test_a_broken_round_ends_with_zeros_and_is_not_committed(group, monkeypatch) -> None:
    monkeypatch.setattr(group, "operate", lambda *arguments: False)
    monkeypatch.setattr(group, "commit", lambda: False)
    result, is_committed = jax.jit(_all_operations)(jnp.ones((2, 2)))
    assert not bool(is_committed)
    assert not np.asarray(result).any()


def test_an_error_of_the_group_ends_the_program(group, monkeypatch) -> None:
    def fail(*arguments: object) -> bool:
        raise ValueError("no such operation")

    monkeypatch.setattr(group, "operate", fail)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="no such operation"):
        jax.block_until_ready(jax.jit(_all_operations)(jnp.ones((2, 2))))
    assert isinstance(elastic_rounds.error_of_rounds(), ValueError)
    assert elastic_rounds.error_of_rounds() is None


def test_a_version_without_handlers_is_refused(group, monkeypatch) -> None:
    monkeypatch.setattr(elastic_rounds, "handlers_work", lambda: False)
    with pytest.raises(RuntimeError, match="does not call handlers as expected"):
        serve_rounds(group)
