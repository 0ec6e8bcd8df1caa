"""Components of ON_READ variables that each member of an elastic group keeps of all."""

from __future__ import annotations

import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.execution.programs.elastic_program import (
    components_of_all,
    held_components,
    hold_components,
    merged_components,
)


class _Gathers:
    """Stands in for rounds with a peer whose values are 1 larger; counts the messages."""

    def __init__(self) -> None:
        self.dtypes: list[Any] = []

    def gather(self, own: jax.Array, count: int) -> jax.Array:
        self.dtypes.append(own.dtype)
        return jnp.stack([own + rank for rank in range(count)])


def test_components_of_all_have_one_message_for_each_dtype() -> None:
    rounds: Any = _Gathers()
    own = [
        jnp.arange(6.0).reshape(1, 2, 3),
        jnp.array([4], jnp.int32),
        jnp.array([[0.5]]),
        jnp.array([[7, 8]], jnp.int32),
    ]
    found = components_of_all(own, rounds, 3)
    assert rounds.dtypes == [jnp.float32, jnp.int32]
    for mine, everyone in zip(own, found, strict=True):
        wanted = np.concatenate([np.asarray(mine) + rank for rank in range(3)])
        np.testing.assert_array_equal(everyone, wanted)
        assert everyone.dtype == mine.dtype


def test_without_components_nothing_is_sent() -> None:
    rounds: Any = _Gathers()
    assert components_of_all([], rounds, 2) == []
    assert rounds.dtypes == []


def test_those_that_took_no_part_keep_their_components() -> None:
    before = [np.array([1.0, 2.0, 3.0]), np.array([[1], [2], [3]])]
    new = [jnp.array([10.0, 20.0, 30.0]), jnp.array([[10], [20], [30]])]
    counted, rows = merged_components(new, before, [0, 2])
    np.testing.assert_array_equal(counted, [10.0, 2.0, 30.0])
    np.testing.assert_array_equal(rows, [[10], [2], [30]])
    np.testing.assert_array_equal(before[0], [1.0, 2.0, 3.0])


def test_components_are_held_until_the_variable_has_other_values() -> None:
    class Whole:
        storage: Any = None
        gathered: Any = None

        def hold(self, storage: Any, gathered: Any) -> None:
            self.storage, self.gathered = storage, gathered

    variables = [types.SimpleNamespace(whole=Whole(), stored=object()) for _ in range(2)]
    hold_components(variables, [np.array([1, 2]), None])
    first, second = held_components(variables)
    np.testing.assert_array_equal(first, [1, 2])
    assert second is variables[1].whole.gathered is None
    variables[0].stored = object()  # assigned since
    assert held_components(variables) == [None, None]
