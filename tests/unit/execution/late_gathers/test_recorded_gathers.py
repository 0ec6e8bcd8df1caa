"""The order of gathers: how far ahead they start, and how long their results are kept."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.execution.late_gathers.gathers import GatherLimits
from stratagem.execution.late_gathers.late_step import RecordedGathers
from stratagem.execution.late_gathers.weights import Sharded, WeightShard

SHARDED = Sharded(0, PartitionSpec(), Topology(tuple(jax.devices()[:2])))
SIZE_BYTES = 8 * 8 * 4  # of a gathered weight


def recorded(reads: list[int], limits: GatherLimits) -> RecordedGathers:
    """Products with weights, given by number, one after the other."""
    closed = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((4, 8)), jnp.ones((8, 8)))
    (product,) = closed.jaxpr.eqns
    batch, shard = product.invars[0].aval, jax.ShapeDtypeStruct((4, 8), jnp.float32)
    weights = [WeightShard(shard, SHARDED, place) for place in range(max(reads) + 1)]
    gathers = RecordedGathers(closed.jaxpr, limits)
    for number in reads:
        (result,) = gathers.evaluate(product, [batch, weights[number]])
        assert result.shape == (4, 8)
    return gathers


def starts(gathers: RecordedGathers) -> list[list[int]]:
    return [[one.shard.place for one in use] for use in gathers.schedule()]


def places(gathers: RecordedGathers) -> list[int]:
    return [one.shard.place for one in gathers.all]


def test_a_weight_is_gathered_with_its_operation_without_room_ahead() -> None:
    assert starts(recorded([0, 1, 2], GatherLimits())) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("num_ahead", "expected"),
    [
        (1, [[0, 1], [2], [3], []]),
        (2, [[0, 1, 2], [3], [], []]),
        (9, [[0, 1, 2, 3], [], [], []]),
        (0.5, [[0, 1], [2], [3], []]),  # one operation ahead, in any case
    ],
)
def test_gathers_start_as_far_ahead_as_there_is_room(num_ahead, expected) -> None:
    limits = GatherLimits(ahead_bytes=int(num_ahead * SIZE_BYTES))
    assert starts(recorded([0, 1, 2, 3], limits)) == expected


@pytest.mark.parametrize(
    ("num_kept", "expected"),
    [
        (0, [0, 1, 2, 2, 1, 0]),
        (1, [0, 1, 2, 1, 0]),
        (2, [0, 1, 2, 0]),
        (3, [0, 1, 2]),
    ],
)
def test_the_last_weights_are_kept(num_kept, expected) -> None:
    limits = GatherLimits(kept_bytes=num_kept * SIZE_BYTES)
    assert places(recorded([0, 1, 2, 2, 1, 0], limits)) == expected


def test_a_read_makes_a_weight_new() -> None:
    limits = GatherLimits(kept_bytes=2 * SIZE_BYTES)
    found: Any = places(recorded([0, 1, 0, 2, 0, 1], limits))
    assert found == [0, 1, 2, 1]


def test_gathered_weights_are_counted_whole() -> None:
    assert [one.num_bytes for one in recorded([0], GatherLimits()).all] == [SIZE_BYTES]


def test_limits_are_those_of_the_largest_recomputed_layer() -> None:
    closed = jax.make_jaxpr(lambda x, w: x @ w)(jnp.ones((4, 8)), jnp.ones((8, 8)))
    (product,) = closed.jaxpr.eqns
    batch, shard = product.invars[0].aval, jax.ShapeDtypeStruct((4, 8), jnp.float32)
    weights = [WeightShard(shard, SHARDED, place) for place in range(3)]
    large = WeightShard(jax.ShapeDtypeStruct((400, 8), jnp.float32), SHARDED, 3)
    gathers = RecordedGathers(closed.jaxpr)
    assert gathers.limits() == GatherLimits()
    gathers.evaluate(product, [batch, large])
    assert gathers.limits() == GatherLimits(100 * SIZE_BYTES, 100 * SIZE_BYTES)
    for numbers in ([0], [1, 2, 2, 1]):  # each of a layer's weights counts once
        with gathers.layer():
            for number in numbers:
                gathers.evaluate(product, [batch, weights[number]])
    assert gathers.limits() == GatherLimits(2 * SIZE_BYTES, SIZE_BYTES, 2 * SIZE_BYTES)
