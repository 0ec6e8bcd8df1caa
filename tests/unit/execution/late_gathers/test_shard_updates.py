"""Updates that a device computes for its own shards: those by element, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.execution.late_gathers.gathers import ShardUpdate, shard_updates
from stratagem.execution.late_gathers.weights import Sharded

SHAPE = (8, 3)
WEIGHT, SLOT, COUNT, GRADIENT = ("input", 0), ("input", 1), ("input", 2), ("handed", 0)


def along(axis: int) -> Sharded:
    return Sharded(axis, PartitionSpec(), Topology(tuple(jax.devices()[:2])))


def found(update: Any, axis: int | None = 0) -> tuple[list[ShardUpdate], Any]:
    """The parts of an update of a weight, a slot, a count and a summed gradient."""
    like = [jnp.ones(SHAPE), jnp.ones(SHAPE), jnp.zeros((), jnp.int32), jnp.ones(SHAPE)]
    closed = jax.make_jaxpr(update)(*like)
    sources = [WEIGHT, SLOT, COUNT, GRADIENT]
    one = None if axis is None else along(axis)
    axes = {WEIGHT: one, SLOT: one, COUNT: None, GRADIENT: one}
    return shard_updates(closed.jaxpr, sources, axes.__getitem__), closed


def momentum(weight, slot, count, gradient):
    slot = 0.9 * slot + gradient
    return weight - slot * (0.1 ** (count + 1).astype("float32")), slot, count + 1


def adam_like(weight, slot, count, gradient):
    slot = jnp.where(count > 0, slot, jnp.zeros_like(slot)) + jnp.square(gradient)
    return weight - jnp.clip(gradient, -1, 1) / (jnp.sqrt(slot) + 1e-7), slot, count + 1


@pytest.mark.parametrize("update", [momentum, adam_like])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_updated_as_the_whole_is(update, axis) -> None:
    (one,), _ = found(update, axis)
    assert sorted(one.outputs) == [0, 1]
    assert one.sharded.axis == axis
    keys = jax.random.split(jax.random.key(0), 3)
    weight, slot, gradient = (jax.random.normal(key, SHAPE) for key in keys)
    values = {WEIGHT: weight, SLOT: slot, GRADIENT: gradient}
    expected = update(weight, slot, jnp.asarray(2), gradient)
    parts = []
    for shard in range(SHAPE[axis]):  # as many shards as there can be
        cut = {
            key: jax.lax.slice_in_dim(value, shard, shard + 1, axis=axis)
            for key, value in values.items()
        }
        cut[COUNT] = jnp.asarray(2)
        parts.append(one.values([cut[source] for source in one.sources], cut[WEIGHT].shape))
    for place, column in zip(one.outputs, zip(*parts, strict=True), strict=True):
        whole = np.concatenate(column, axis)
        np.testing.assert_allclose(whole, expected[place], rtol=1e-6)


def normalized(weight, slot, count, gradient):
    return weight - gradient / jnp.linalg.norm(gradient), slot, count


def by_row(weight, slot, count, gradient):
    return weight - gradient * jnp.sum(slot, 1, keepdims=True), slot, count


def transposed(weight, slot, count, gradient):
    return weight - (gradient.T @ gradient)[:1], slot, count


def drawn(weight, slot, count, gradient):
    return weight - gradient * jax.random.uniform(jax.random.key(count), SHAPE), slot, count


def without_gradient(weight, slot, count, gradient):
    return weight * 0.9, slot, count


@pytest.mark.parametrize("update", [normalized, by_row, transposed, drawn, without_gradient])
def test_other_updates_stay_where_they_are(update) -> None:
    assert found(update)[0] == []


def test_what_is_not_sharded_stays() -> None:
    assert found(momentum, None)[0] == []


def test_weights_and_slots_along_different_axes_stay() -> None:
    closed = jax.make_jaxpr(momentum)(
        jnp.ones(SHAPE), jnp.ones(SHAPE), jnp.zeros((), jnp.int32), jnp.ones(SHAPE)
    )
    axes = {WEIGHT: along(0), SLOT: along(1), COUNT: None, GRADIENT: along(0)}
    parts = shard_updates(closed.jaxpr, [WEIGHT, SLOT, COUNT, GRADIENT], axes.__getitem__)
    assert parts == []


@pytest.mark.parametrize(
    "name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Adadelta", "Adamax", "Nadam", "Lion"]
)
def test_optimizers_of_keras_update_by_element(name) -> None:
    optimizer = getattr(keras.optimizers, name)(0.1)
    kernel = keras.Variable(np.ones(SHAPE))
    optimizer.build([kernel])
    state = [kernel, *optimizer.variables]

    def update(gradient: Any, *values: Any) -> list[Any]:
        with keras.StatelessScope(list(zip(state, values, strict=True))) as scope:
            optimizer.apply([gradient], [kernel])
        return [scope.get_current_value(one) for one in state]

    closed = jax.make_jaxpr(update)(jnp.ones(SHAPE), *(one.value for one in state))
    sources = [GRADIENT, *(("input", place) for place in range(len(state)))]
    (one,) = shard_updates(closed.jaxpr, sources, lambda _: along(0))
    assert sorted(one.outputs) == [p for p, each in enumerate(state) if each.shape == SHAPE]
