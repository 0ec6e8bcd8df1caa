"""Replica functions whose weights come as shards: the same results, and a gather for each use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Jaxpr, Var
from jax.sharding import Mesh, PartitionSpec

from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.jaxprs import inner_jaxprs
from stratagem.execution.programs import late_step
from stratagem.execution.programs.late_step import LateStep
from stratagem.execution.programs.late_weights import Sharded

NUM_REPLICAS = 2
MESH = Mesh(np.array(jax.devices()[:NUM_REPLICAS]), (REPLICA_AXIS,))
COPIED, SPLIT = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
WIDTH = 8

Step = Callable[..., Any]  # of two weights and a batch of its own


@pytest.fixture(autouse=True)
def _no_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 0)


def gradients(loss: Step) -> Step:
    return lambda *args: jax.value_and_grad(loss, argnums=(0, 1))(*args)


def layers(first, second, batch):
    return jnp.sum(jnp.tanh(jnp.tanh(batch @ first) @ second) ** 2)


def half_precision(first, second, batch):
    cast = [one.astype(jnp.bfloat16) for one in (first, second, batch)]
    return layers(*cast).astype(jnp.float32)


def inner_functions(first, second, batch):
    hidden = jax.nn.relu(jnp.einsum("bi,ij->bj", batch, first))
    return jnp.sum(jax.jit(lambda x, w: jnp.sin(x @ w.T))(hidden, second))


def rematerialized(first, second, batch):
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.tanh(x @ w) @ w))
    return jnp.sum(layer(layer(batch, first), second))


def low_rank(first, second, batch):
    weight = first + 0.5 * (second[:, :2] @ second[:2])
    return jnp.sum(jnp.tanh(batch @ weight) ** 2)


def quantized(first, second, batch):
    weight = jnp.round(lax.stop_gradient(first) * 8).astype(jnp.int8)
    return jnp.sum((batch @ (weight.astype(jnp.float32) / 8)) @ second)


def recurrent(first, second, batch):
    hidden, _ = lax.scan(lambda x, _: (jnp.tanh(x @ first), None), batch, length=3)
    return jnp.sum(hidden @ second)


LOSSES = [
    *(layers, half_precision, inner_functions, rematerialized, low_rank, quantized, recurrent),
    lambda w, v, x: jnp.sum(lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x @ v)),
    lambda w, v, x: layers(w, v, x) + jnp.sum(w**2) + jnp.sum(jnp.abs(v)),  # regularized
    lambda w, v, x: jnp.sum((jnp.tanh(x @ w) @ v) @ w.T),  # tied
]


def late(step: Step, axes: list[int | None], sum_axes: dict[int, int] | None = None) -> Any:
    """The step with weights that come as shards along axes, and sums that leave as shards."""
    return late_function(step, [weight(0), weight(0), weight(0)[:4]], axes, sum_axes or {})


def late_function(
    function: Step, examples: list[Any], axes: list[int | None], sum_axes: dict[int, int]
) -> Any:
    """A function of weights, which come as shards along axes, and of a batch of each replica.

    Results that `sum_axes` names leave as shards of their sums, and others by replica.
    """
    closed = jax.make_jaxpr(function)(*examples)
    num_outputs = len(closed.jaxpr.outvars)
    of_replica = LateStep(
        closed.jaxpr,
        [*(None if axis is None else sharded(axis) for axis in axes), None],
        is_steady=[*[True] * len(axes), False],
        sums={place: sharded(axis) for place, axis in sum_axes.items()},
        updates=[],
        first_handed=num_outputs,
        returned=range(num_outputs),
    )
    assert not closed.consts

    def run(*args: Any) -> list[Any]:
        *weights, batch = args
        values = [*weights, batch[0]]
        outputs, _ = of_replica.outputs({i: values[i] for i in of_replica.read_inputs})
        return [one if i in sum_axes else one[None] for i, one in enumerate(outputs)]

    return jax.shard_map(
        run,
        mesh=MESH,
        in_specs=(*map(spec, axes), SPLIT),
        out_specs=[spec(sum_axes[i]) if i in sum_axes else SPLIT for i in range(num_outputs)],
        check_vma=False,
    )


def sharded(axis: int) -> Sharded:
    return Sharded(axis, PartitionSpec(), Topology(tuple(jax.devices()[:NUM_REPLICAS])))


def spec(axis: int | None) -> PartitionSpec:
    return COPIED if axis is None else PartitionSpec(*[None] * axis, REPLICA_AXIS)


def weight(seed: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (WIDTH, WIDTH)) / WIDTH


def batches() -> jax.Array:
    return jax.random.normal(jax.random.key(9), (NUM_REPLICAS, 4, WIDTH))


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from equations(inner)


def gathers(function: Any) -> list[Any]:
    """The types of what is gathered, in order."""
    jaxpr = jax.make_jaxpr(function)(weight(0), weight(1), batches()).jaxpr
    return [e.outvars[0].aval for e in equations(jaxpr) if e.primitive.name == "all_gather"]


@pytest.mark.parametrize(
    ("loss", "axes"),
    [*((loss, [0, 1]) for loss in LOSSES), (layers, [1, None]), (rematerialized, [1, None])],
)
def test_results_are_those_of_whole_weights(loss, axes) -> None:
    step = gradients(loss)
    found = jax.jit(late(step, axes))(weight(0), weight(1), batches())
    for replica, batch in enumerate(batches()):
        expected = jax.tree.leaves(jax.jit(step)(weight(0), weight(1), batch))
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one[replica], other, rtol=1e-5, atol=1e-6)


def test_backward_pass_gathers_again() -> None:
    def deep(first, second, batch):
        for _ in range(3):
            batch = jnp.tanh(jnp.tanh(batch @ first) @ second)
        return jnp.sum(batch)

    # The last gathered weight is kept: for the backward pass of the same layer.
    assert len(gathers(late(gradients(deep), [0, 0]))) == 6 + 6 - 1 - 1  # batch has no gradient


def test_shards_are_cast_before_they_are_sent() -> None:
    found = gathers(late(gradients(half_precision), [0, 0]))
    assert {one.dtype for one in found} == {jnp.dtype("bfloat16")}
    assert {one.dtype for one in gathers(late(gradients(quantized), [0, None]))} == {
        jnp.dtype("float32")  # rounded by what only the whole weight may tell
    }


def test_loop_gathers_its_weight_once() -> None:
    step = late(lambda *args: (recurrent(*args),), [0, 0])
    jaxpr = jax.make_jaxpr(step)(weight(0), weight(1), batches()).jaxpr
    loops = [e for e in equations(jaxpr) if e.primitive.name == "scan"]
    inside = [e for loop in loops for e in equations(loop.params["jaxpr"].jaxpr)]
    assert loops
    assert not [e for e in inside if e.primitive.name == "all_gather"]


def test_sums_leave_as_shards() -> None:
    step = gradients(layers)
    found = jax.jit(late(step, [0, 0], {1: 0, 2: 1}))(weight(0), weight(1), batches())
    expected = [jax.tree.leaves(step(weight(0), weight(1), one)) for one in batches()]
    for place in (1, 2):
        total = sum(one[place] for one in expected)
        np.testing.assert_allclose(found[place], total, rtol=1e-5, atol=1e-6)


def test_weight_that_is_returned_is_whole_and_a_batch_is_summed() -> None:
    found = late(lambda first, second, batch: (batch, jnp.sum(first)), [0, 0], {0: 0})
    total, _ = jax.jit(found)(weight(0), weight(1), batches())
    np.testing.assert_allclose(total, batches().sum(0), rtol=1e-6)
    found = late(lambda first, second, batch: (first.T, batch @ second), [0, 1])
    first, _ = jax.jit(found)(weight(0), weight(1), batches())
    for replica in range(NUM_REPLICAS):
        np.testing.assert_array_equal(first[replica], weight(0).T)


def test_small_weights_are_gathered_at_the_start(monkeypatch) -> None:
    monkeypatch.setattr(late_step, "_MIN_LATE_BYTES", 2**20)
    jaxpr = jax.make_jaxpr(late(gradients(layers), [0, 0]))(weight(0), weight(1), batches()).jaxpr
    names = [e.primitive.name for e in equations(jaxpr)]
    assert names.count("all_gather") == 2
    assert names.index("dot_general") > max(i for i, one in enumerate(names) if one == "all_gather")


def test_recomputation_waits_for_the_backward_pass() -> None:
    jaxpr = jax.make_jaxpr(late(gradients(rematerialized), [0, 0]))(
        weight(0), weight(1), batches()
    ).jaxpr
    names = [e.primitive.name for e in equations(jaxpr)]
    assert "remat2" not in names
    assert "checkpoint" not in names
    assert names.count("tanh") == 4 + 4  # computed again
    assert "optimization_barrier" in names


def test_a_layer_gathers_its_last_weight_after_the_sums_of_the_layer_before() -> None:
    """Otherwise gradients or their operands would stay in memory during a whole layer."""
    num_layers, num_products, width = 4, 4, 32

    def stack(*args: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, *weights: Any) -> Any:
            return functools.reduce(lambda y, one: jnp.tanh(y @ one), weights, x)

        batch = args[-1]
        for first in range(0, num_layers * num_products, num_products):
            batch = layer(batch, *args[first : first + num_products])
        return jnp.sum(batch)

    count = num_layers * num_products
    values = [*[jnp.ones((width, width))] * count, jnp.ones((4, width))]
    replica = LateStep(
        jax.make_jaxpr(jax.grad(stack, argnums=range(count)))(*values).jaxpr,
        [*[sharded(0)] * count, None],
        is_steady=[*[True] * count, False],
        sums={place: sharded(0) for place in range(count)},
        updates=[],
        first_handed=count,
        returned=range(count),
    )
    mapped = jax.shard_map(
        lambda *values: replica.outputs(dict(enumerate(values)))[0],
        mesh=MESH,
        in_specs=(*[spec(0)] * count, COPIED),
        out_specs=[spec(0)] * count,
        check_vma=False,
    )
    (inner,) = jax.make_jaxpr(mapped)(*values).jaxpr.eqns
    needs: dict[Any, set[int]] = {}  # the sums that each value waits for
    sums = set[int]()
    at_last_gather: dict[int, set[int]] = {}  # by the number of sums that came before
    for eqn in inner.params["jaxpr"].eqns:
        variables = [one for one in eqn.invars if isinstance(one, Var)]
        awaited = set[int]().union(*(needs.get(one, set()) for one in variables))
        if eqn.primitive.name == "reduce_scatter":
            awaited.add(len(sums))
            sums |= awaited
        elif eqn.primitive.name == "all_gather":
            at_last_gather[len(sums)] = awaited
        needs.update(dict.fromkeys(eqn.outvars, awaited))
    assert len(sums) == count
    assert {number: len(one) for number, one in at_last_gather.items()} == {
        number: number for number in range(0, count, num_products)
    }


# Scans over stacked weights: an iteration gathers and sums its own layer's alone.


def _stack(*weights: Any) -> Any:
    return lax.concatenate([lax.expand_dims(one, (0,)) for one in weights], 0)


def stacked(first: Any, second: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(jnp.sin(x @ w) @ w), None

    return jnp.sum(lax.scan(layer, batch, _stack(first, second))[0])


def recomputed(first: Any, second: Any, batch: Any) -> Any:
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(jnp.sin(x @ w) @ w), None))
    return jnp.sum(lax.scan(layer, batch, _stack(first, second))[0])


def half_precision_in_a_loop(first: Any, second: Any, batch: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w.astype(jnp.bfloat16)), None

    x = batch.astype(jnp.bfloat16)
    return jnp.sum(lax.scan(layer, x, _stack(first, second))[0].astype(jnp.float32))


def stack_of_a_variable(first: Any, second: Any, batch: Any) -> Any:
    """A user's own loop: the rows of `first` are the weights of its iterations."""
    x, _ = lax.scan(lambda x, row: (jnp.tanh(x * row), None), batch, first)
    return jnp.sum(x @ second)


def _in_loops(step: Callable[..., Any], name: str) -> list[Any]:
    jaxpr = jax.make_jaxpr(step)(weight(0), weight(1), batches()).jaxpr
    loops = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    inside = [eqn for loop in loops for eqn in equations(loop.params["jaxpr"].jaxpr)]
    return [eqn for eqn in inside if eqn.primitive.name == name]


@pytest.mark.parametrize(
    ("loss", "axis"),
    [(stacked, 0), (recomputed, 1), (half_precision_in_a_loop, 0), (stack_of_a_variable, 1)],
)
def test_gradients_are_those_of_whole_weights(loss: Callable[..., Any], axis: int) -> None:
    step = gradients(loss)
    sums = {1: axis, 2: axis}
    found = jax.jit(late(step, [axis, axis], sums))(weight(0), weight(1), batches())
    replicas = [jax.tree.leaves(jax.jit(step)(weight(0), weight(1), one)) for one in batches()]
    tolerance = 2e-2 if loss is half_precision_in_a_loop else 1e-5
    for place in (1, 2):
        total = sum(one[place] for one in replicas)
        np.testing.assert_allclose(found[place], total, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("loss", [stacked, recomputed, half_precision_in_a_loop])
def test_iterations_gather_and_sum_their_own_layer(loss: Callable[..., Any]) -> None:
    step = late(gradients(loss), [0, 0], {1: 0, 2: 0})
    gathered = _in_loops(step, "all_gather")
    summed = _in_loops(step, "reduce_scatter")
    assert len(gathered) >= 2  # in each pass
    assert {one.outvars[0].aval.shape for one in gathered} == {(WIDTH, WIDTH)}
    assert [one.invars[0].aval.shape for one in summed] == [(WIDTH, WIDTH)]
    every = jax.make_jaxpr(step)(weight(0), weight(1), batches()).jaxpr
    names = [eqn.primitive.name for eqn in equations(every)]
    assert names.count("all_gather") == len(gathered)
    assert names.count("reduce_scatter") == 1


def test_stacks_are_of_the_dtype_that_is_computed_in() -> None:
    gathered = _in_loops(late(gradients(half_precision_in_a_loop), [0, 0]), "all_gather")
    assert {one.invars[0].aval.dtype for one in gathered} == {jnp.dtype("bfloat16")}


def test_slices_of_a_variable_are_gathered_late_if_it_is_not_sharded_by_them() -> None:
    step = gradients(stack_of_a_variable)
    assert not _in_loops(late(step, [0, 0], {1: 0}), "all_gather")
    gathered = _in_loops(late(step, [1, 0], {1: 1}), "all_gather")
    assert {one.outvars[0].aval.shape for one in gathered} == {(WIDTH,)}
    assert len(_in_loops(late(step, [1, 0], {1: 1}), "reduce_scatter")) == 1


def test_gradient_that_something_else_reads_is_summed_after_the_loop() -> None:
    def step(first: Any, second: Any, batch: Any) -> Any:
        loss, (one, other) = gradients(stacked)(first, second, batch)
        return loss + jnp.sum(one), one, other

    assert not _in_loops(late(step, [0, 0], {1: 0, 2: 0}), "reduce_scatter")
    found = jax.jit(late(step, [0, 0], {1: 0, 2: 0}))(weight(0), weight(1), batches())
    expected = [step(weight(0), weight(1), one) for one in batches()]
    total = sum(np.asarray(one[1]) for one in expected)
    np.testing.assert_allclose(found[1], total, rtol=1e-5, atol=1e-5)
