"""Updates that a device computes for its own shards: those by element, and no others."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.core import eval_jaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.programs import late_step
from stratagem.execution.programs.late_gathers import GatherLimits, ShardUpdate, shard_updates
from stratagem.execution.programs.late_step import LateStep, RecordedGathers, with_early_outputs
from stratagem.execution.programs.late_weights import Sharded, WeightShard

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


OTHER_UPDATES = {
    "normalized": lambda w, slot, count, g: (w - g / jnp.linalg.norm(g), slot, count),
    "by row": lambda w, slot, count, g: (w - g * jnp.sum(slot, 1, keepdims=True), slot, count),
    "transposed": lambda w, slot, count, g: (w - (g.T @ g)[:1], slot, count),
    "drawn": lambda w, slot, count, g: (
        w - g * jax.random.uniform(jax.random.key(count), SHAPE), slot, count,
    ),
    "without gradient": lambda w, slot, count, g: (w * 0.9, slot, count),
}  # fmt: skip


@pytest.mark.parametrize("update", OTHER_UPDATES.values(), ids=OTHER_UPDATES)
def test_other_updates_stay_where_they_are(update) -> None:
    assert found(update)[0] == []
    assert found(momentum, None)[0] == []  # not sharded
    _, closed = found(momentum)
    axes = {WEIGHT: along(0), SLOT: along(1), COUNT: None, GRADIENT: along(0)}
    assert shard_updates(closed.jaxpr, [WEIGHT, SLOT, COUNT, GRADIENT], axes.__getitem__) == []


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


# Small outputs that are computed as soon as their inputs are there.

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)
LARGE = 2**17


def step(x: Any, total: Any) -> Any:
    """A training step in the order of Keras: metrics come last, and need what came first."""
    logits = jnp.sin(x)
    gradient = jnp.cos(jnp.cos(logits)) * 2
    new_weight = jnp.tile(gradient.reshape(-1), LARGE)
    metric = jnp.sum(jnp.square(logits))
    return new_weight, total + metric, jnp.max(new_weight)


def names(jaxpr: Any) -> list[str]:
    return [eqn.primitive.name for eqn in jaxpr.eqns]


def test_metrics_follow_their_inputs() -> None:
    before = jax.make_jaxpr(step)(X, 0.0).jaxpr
    after = with_early_outputs(before)
    assert names(before).index("square") > names(before).index("cos")
    first = names(after).index("sin")
    assert names(after)[first : first + 3] == ["sin", "square", "reduce_sum"]
    assert names(after)[-1] == "reduce_max"  # needs what was computed last
    assert sorted(names(before)) == sorted(names(after))
    for one, other in zip(
        eval_jaxpr(before, [], X, 1.0), eval_jaxpr(after, [], X, 1.0), strict=True
    ):
        np.testing.assert_array_equal(one, other)


def test_large_outputs_stay_in_their_place() -> None:
    jaxpr = jax.make_jaxpr(lambda x: (jnp.cos(jnp.cos(x)), jnp.sin(x)))(np.ones(LARGE)).jaxpr
    assert names(with_early_outputs(jaxpr)) == ["cos", "cos", "sin"]


@pytest.mark.parametrize("is_first", [True, False])
def test_operations_with_weights_wait_for_the_loss(monkeypatch, is_first) -> None:
    """The compiler would compute it last, and keep its operand to the end."""
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)
    devices = jax.devices()[:2]

    def train(weights: Any, x: Any) -> Any:
        y = x @ weights[0]
        loss = jnp.sum(jnp.square(y)) if is_first else 0.0
        for one in weights[1:]:
            y = y @ one
        return loss if is_first else jnp.sum(y), jnp.tile(y.reshape(-1), LARGE)

    weights = [np.ones((4, 4), "float32")] * 4
    closed = jax.make_jaxpr(train)(weights, X)
    sharded = Sharded(0, PartitionSpec(), Topology(tuple(devices)))
    late = LateStep(
        closed.jaxpr, [sharded] * 4 + [None], [True] * 4 + [False], {}, [], 2, returned=[0, 1]
    )
    split = PartitionSpec(REPLICA_AXIS)
    function = jax.shard_map(
        lambda *args: late.outputs(dict(enumerate(args)))[0],
        mesh=Mesh(np.array(devices), (REPLICA_AXIS,)),
        in_specs=(*[split] * 4, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    (eqn,) = jax.make_jaxpr(function)(*weights, X).jaxpr.eqns
    inner = eqn.params["jaxpr"]
    waiting = [
        one
        for one in inner.eqns
        if one.primitive.name == "optimization_barrier"
        and any(atom.aval.shape == () for atom in one.invars)
    ]
    assert len(waiting) == is_first
    expected = train([jnp.array(one) for one in weights], X)[0]
    np.testing.assert_allclose(jax.jit(function)(*weights, X)[0], expected, rtol=1e-6)


# The order of gathers: how far ahead they start, and how long their results are kept.

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


@pytest.mark.parametrize(
    ("num_ahead", "expected"),
    [
        (0, [[0], [1], [2], [3]]),
        (1, [[0, 1], [2], [3], []]),
        (2, [[0, 1, 2], [3], [], []]),
        (9, [[0, 1, 2, 3], [], [], []]),
        (0.5, [[0, 1], [2], [3], []]),  # one operation ahead, in any case
    ],
)
def test_gathers_start_as_far_ahead_as_there_is_room(num_ahead, expected) -> None:
    gathers = recorded([0, 1, 2, 3], GatherLimits(ahead_bytes=int(num_ahead * SIZE_BYTES)))
    assert starts(gathers) == expected
    assert {one.num_bytes for one in gathers.all} == {SIZE_BYTES}


@pytest.mark.parametrize(
    ("reads", "num_kept", "expected"),
    [
        ([0, 1, 2, 2, 1, 0], 0, [0, 1, 2, 2, 1, 0]),
        ([0, 1, 2, 2, 1, 0], 1, [0, 1, 2, 1, 0]),
        ([0, 1, 2, 2, 1, 0], 2, [0, 1, 2, 0]),
        ([0, 1, 2, 2, 1, 0], 3, [0, 1, 2]),
        ([0, 1, 0, 2, 0, 1], 2, [0, 1, 2, 1]),  # a read makes a weight new
    ],
)
def test_the_last_weights_are_kept(reads, num_kept, expected) -> None:
    limits = GatherLimits(kept_bytes=num_kept * SIZE_BYTES)
    assert places(recorded(reads, limits)) == expected


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


# Exchanges of one value: sums in shards and gathers, also by each of a replica's devices.


def test_shards_of_sums_are_never_whole_on_a_device_of_a_replica() -> None:
    topology = Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))
    spec = PartitionSpec(None, topology.logical_axes)
    values = np.arange(2 * 6 * 4, dtype=np.float32).reshape(2, 6, 4)

    def step(stacked: Any) -> Any:
        return Sharded(0, spec, topology).scatter(stacked[0])

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=topology.mesh,
            in_specs=PartitionSpec(REPLICA_AXIS),
            out_specs=PartitionSpec(REPLICA_AXIS),
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )
    )
    inside = NamedSharding(topology.mesh, PartitionSpec(REPLICA_AXIS, None, "logical"))
    compiled = run.lower(jax.device_put(values, inside)).compile()
    np.testing.assert_array_equal(compiled(jax.device_put(values, inside)), values.sum(0))
    assert "all-gather" not in compiled.as_text()
    narrow = jax.device_put(values.astype(jnp.bfloat16), inside)  # XLA aborts without the spec
    np.testing.assert_array_equal(run(narrow), values.sum(0).astype(jnp.bfloat16))
