"""Updates of variables apart from the rest of a step; the sine stands for what members combine."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stratagem.execution.programs import elastic_program as module
from stratagem.execution.programs.elastic_program import Update, update_apart


def _step(variables: list[Any], rows: jax.Array, rate: jax.Array) -> Any:
    """Returns new weights, a count and a component; then a result, and a sum of all."""
    weights, count, component = variables
    total = jnp.sin(rows.sum() * weights)
    moved = weights - rate * total / (1 + count)
    return [moved, count + 1, component + rows.sum()], [rows * 2, moved.sum()]


def _arguments() -> list[Any]:
    return [[jnp.arange(4.0), jnp.float32(3), jnp.float32(5)], jnp.ones(6), jnp.float32(0.1)]


def _run(is_updated: list[bool]) -> tuple[Any, list[Any], Update]:
    updates: list[Update] = []

    @jax.jit
    def part(*arguments: Any) -> Any:
        results, combined, update = update_apart(_step, arguments, is_updated, "sin")
        updates.append(update)
        return results, combined

    results, combined = part(*_arguments())
    return results, combined, updates[0]


def test_the_update_and_the_rest_are_the_whole_step() -> None:
    (values, others), combined, update = _run([True, True, False])
    expected_values, expected_others = _step(*_arguments())
    assert values[:2] == [None, None]
    np.testing.assert_allclose(values[2], expected_values[2])
    for mine, wanted in zip(others, expected_others, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-6)
    new = update.run(jax.tree.leaves(tuple(_arguments())), combined)
    assert sorted(new) == [0, 1]
    for place, value in new.items():
        np.testing.assert_allclose(value, expected_values[place], rtol=1e-6)


def test_the_update_takes_nothing_from_rows_but_what_is_combined() -> None:
    _, combined, update = _run([True, True, False])
    assert [np.shape(one) for one in combined] == [(4,)]
    rows = 3  # among the flat inputs
    assert rows not in update.inputs


def test_old_values_of_updated_variables_alone_are_donated() -> None:
    _, combined, update = _run([True, False, False])
    flat = jax.tree.leaves(tuple(_arguments()))
    update.run(flat, combined)
    assert [array.is_deleted() for array in flat] == [True, False, False, False, False]


def test_all_numbers_of_members_have_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_programs", {})
    first, second = (_run([True, True, False])[2] for _ in range(2))
    assert first.program is second.program
    assert _run([True, False, False])[2].program is not first.program


def test_a_variable_that_stays_is_no_part_of_the_update() -> None:
    def step(variables: list[Any]) -> Any:
        return [variables[0], jnp.sin(variables[1])]

    results, _, update = update_apart(step, [[jnp.ones(2), jnp.ones(2)]], [True, True], "sin")
    np.testing.assert_array_equal(results[0], np.ones(2))
    np.testing.assert_allclose(results[1], np.sin(np.ones(2)), rtol=1e-6)
    assert update.places == ()
