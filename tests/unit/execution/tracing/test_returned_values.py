"""Results of a step: variables become values, containers pytrees, and rows keep their lengths."""

from __future__ import annotations

import collections
import dataclasses
import types
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from stratagem.execution.context.replica import ReplicaBatch
from stratagem.execution.tracing.tracer import Results, as_values, rebuilt


@dataclasses.dataclass(frozen=True)
class Pair:
    """Not registered with JAX."""

    first: Any
    second: Any


def test_variables_in_containers_are_read() -> None:
    variable = keras.Variable([1.0, 2.0])
    values = as_values({"v": [variable, (variable, "text")]})
    assert values["v"][1][1] == "text"
    for value in (values["v"][0], values["v"][1][0]):
        assert isinstance(value, jax.Array)
        np.testing.assert_array_equal(value, [1, 2])


def test_late_variables_stay() -> None:
    now, later = keras.Variable(1.0), keras.Variable(2.0)
    values = as_values([now, later], lambda variable: variable is later)
    assert float(values[0]) == 1.0
    assert values[1] is later


def test_dataclass_comes_back_with_values_and_is_a_pytree_on_the_way() -> None:
    values = as_values(Pair(keras.Variable(1.0), {"x": jnp.ones(2)}))
    assert [np.shape(leaf) for leaf in jax.tree.leaves(values)] == [(), (2,)]
    doubled = rebuilt(jax.tree.map(lambda leaf: leaf * 2, values))
    assert isinstance(doubled, Pair)
    assert float(doubled.first) == 2.0
    np.testing.assert_array_equal(doubled.second["x"], [2, 2])


@pytest.mark.parametrize("other", [Pair("a", 3), Pair, object(), "text", None])
def test_leaves_without_values_stay_as_they_are(other) -> None:
    assert as_values(other) is other


def test_other_mappings_and_sequences_become_plain() -> None:
    mapping = types.MappingProxyType({"x": jnp.ones(1)})
    assert type(as_values(mapping)) is dict
    ordered = as_values(collections.OrderedDict(x=keras.Variable(1.0)))
    assert list(ordered) == ["x"]


def test_arrays_become_outputs_and_other_leaves_stay_in_their_places() -> None:
    results = Results(ReplicaBatch(size=3, lengths=(3, 2)), is_stacked=True)
    outputs = results.flatten({"a": jnp.ones(3), "b": "text", "c": jnp.ones((2, 3)), "d": None})
    assert [output.shape for output in outputs] == [(1, 3), (1, 2, 3)]
    assert results.shapes == [(3,), (2, 3)]
    assert results.leaves == [(True, 0), (False, "text"), (True, 1), (False, None)]
    assert results.lengths == [(3, 2), None, None, None]


def test_without_padding_no_result_has_lengths_and_one_replica_is_not_stacked() -> None:
    results = Results(ReplicaBatch(size=3), is_stacked=False)
    (output,) = results.flatten(jnp.ones(3))
    assert output.shape == (3,)
    assert results.lengths == [None]


def test_late_variable_has_the_place_of_its_output() -> None:
    variable = keras.Variable(np.ones((2, 2), "float32"))
    results = Results(ReplicaBatch(), is_stacked=False)
    outputs = results.flatten([jnp.ones(()), variable])
    assert results.late == [(1, variable)]
    np.testing.assert_array_equal(outputs[1], np.zeros((2, 2)))
