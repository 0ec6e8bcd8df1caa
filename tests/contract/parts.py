"""Values that differ by replica, and a look at what each replica of this process holds.

Replicas are counted by the strategy itself, so that a process may hold some of them only.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import stratagem as sg
from stratagem.group.current import current_group

# Of a test whose steps take long op by op, or that shows there what other tests show. A cluster has
# one row only.
_EAGER_MARKS = () if "STRATAGEM_TEST_REPLICAS" in os.environ else pytest.mark.slow
seldom_eager = pytest.mark.parametrize(
    "execution", ["compiled", pytest.param("eager", marks=_EAGER_MARKS)], indirect=True
)


def split(strategy: sg.Strategy, part_of: Callable[[int], Any]) -> Any:
    """Gives replica i the value `part_of(i)`."""
    return strategy.distribute_values_from_function(
        lambda context: part_of(context.replica_id_in_sync_group)
    )


def replica_ids(strategy: sg.Strategy) -> list[int]:
    """The ids of the replicas of this process."""
    ids: list[int] = []
    strategy.distribute_values_from_function(
        lambda context: ids.append(context.replica_id_in_sync_group)
    )
    return ids


def replica_id(dtype: str = "float32") -> jax.Array:
    """Call in a replica function: 0 on the first replica, 1 on the second, and so on."""
    return jnp.asarray(sg.get_replica_context().replica_id_in_sync_group, dtype)


def contribution(dtype: str = "float32") -> jax.Array:
    """Call in a replica function: one more than the id, what the tables write as [1 | 2]."""
    return replica_id(dtype) + jnp.ones((), dtype)


def parts_of_all(strategy: sg.Strategy, value: Any) -> list[Any]:
    """The parts of the replicas of all processes, on each of them."""
    parts = [np.asarray(part) for part in strategy.local_results(value)]
    group = current_group()
    if group is None or not isinstance(value, sg.PerReplica):
        return parts
    return [part for own in group.exchange("parts of a test", parts) for part in own]


def assert_parts(strategy: sg.Strategy, value: Any, expected: Callable[[int], Any]) -> None:
    """Asserts that replica i holds `expected(i)`, for each replica of this process.

    With one replica, the value must be a plain one.
    """
    assert isinstance(value, sg.PerReplica) == (strategy.num_replicas_in_sync > 1)
    parts = strategy.local_results(value)
    ids = replica_ids(strategy)
    assert len(parts) == len(ids)
    for index, part in zip(ids, parts, strict=True):
        np.testing.assert_allclose(np.asarray(part), expected(index), rtol=1e-6, err_msg=f"{index}")


def assert_plain(value: Any, expected: Any) -> None:
    """Asserts that a value is an ordinary array, of these numbers."""
    assert isinstance(value, jax.Array)
    assert not isinstance(value, sg.DistributedValues)
    np.testing.assert_allclose(np.asarray(value), expected, rtol=1e-6)
    assert np.shape(value) == np.shape(expected)
