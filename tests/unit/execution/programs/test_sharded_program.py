"""Steps with variables in parts on the replicas' devices: one program, and who gets what in it."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax import lax

import stratagem as sg
from stratagem.devices.finding import find_groups
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.execution.programs.offloaded_step import OffloadedStep
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.sharded_step import (
    ShardedStep,
    StepParts,
    part_step,
    store_for,
    stores_of_sums,
)
from stratagem.execution.tracing.arguments import flatten_arguments
from stratagem.execution.tracing.functionalize import StepCaptured, capture
from stratagem.variables.layouts import Division
from stratagem.variables.placement import ShardedStore
from tests.marks import slow
from tests.unit.execution.programs.test_update_part import jaxpr_of

TWO = ["cpu:0", "cpu:1"]
WIDTH, ROWS, ROW = 64, 8192, 8
NUM_KERNEL, NUM_TABLE = WIDTH * WIDTH, ROWS * ROW


class Made:
    """A table and a kernel under a strategy, and one step of them."""

    def __init__(self, strategy: sg.Strategy, optimizer: Any) -> None:
        self.strategy = strategy
        keras.utils.set_random_seed(2)
        with strategy.scope():
            self.table = keras.layers.Embedding(ROWS, ROW)
            self.dense = keras.layers.Dense(WIDTH, use_bias=False)
            self.table.build()
            self.dense.build((None, WIDTH))
            self.rule = optimizer()
            self.rule.build([self.table.embeddings, self.dense.kernel])
        self.data = strategy.distribute_values_from_function(
            lambda context: jnp.arange(8) * 3 + context.replica_id_in_sync_group
        )

    def step(self, ids: Any) -> Any:
        variables = [self.table.embeddings, self.dense.kernel]

        def loss() -> Any:
            return keras.ops.sum(self.dense(keras.ops.reshape(self.table(ids), (1, -1))) ** 2)

        value, grads = sg.value_and_grad(loss, variables)
        self.rule.apply(grads, variables)
        return value

    def run(self, num_steps: int) -> Any:
        for _ in range(num_steps):
            self.strategy.run(self.step, args=(self.data,))
        (program,) = self.strategy.executor.programs
        return program

    def compiled_text(self) -> str:
        arguments = flatten_arguments((self.data,), {}, num_replicas=2)
        return str(self.run(1).lower(arguments).compile().as_text())


def messages(text: str, kind: str) -> list[int]:
    """How many elements the results of the exchanges of a kind have, by message."""
    found: list[int] = []
    for shapes in re.findall(rf"= (.*?) {kind}(?:-start)?\(", text):
        sizes = re.findall(r"\w+\[([\d,]*)\]", shapes)
        found += [int(np.prod([int(n) for n in one.split(",") if n])) for one in sizes]
    return found


def adagrad() -> Any:
    return keras.optimizers.Adagrad(0.1)


def adam() -> Any:
    return keras.optimizers.Adam(0.1)


@pytest.mark.slow
def test_sum_of_what_is_in_parts_is_made_in_parts() -> None:
    made = Made(sg.MirroredStrategy(TWO, shard_state="all"), adagrad)
    text = made.compiled_text()
    assert messages(text, "reduce-scatter").count(NUM_KERNEL // 2) == 1
    assert NUM_KERNEL in messages(text, "all-gather")  # what replicas compute with
    assert NUM_KERNEL not in messages(text, "all-reduce")


@pytest.mark.slow
def test_rows_of_a_table_in_parts_are_updated_without_being_sent() -> None:
    made = Made(sg.HybridStrategy(TWO, placement={"embeddings": "sharded"}), adagrad)
    text = made.compiled_text()
    rows = 8 * ROW
    assert messages(text, "reduce-scatter") == [rows]  # to whoever looks them up
    assert NUM_TABLE not in [*messages(text, "all-gather"), *messages(text, "all-reduce")]
    assert 2 * rows in messages(text, "all-gather")  # their gradients
    assert 2 * rows not in messages(text, "all-reduce")


def test_weights_that_are_copied_are_computed_in_parts() -> None:
    made = Made(sg.MirroredStrategy(TWO, shard_state="optimizer"), adam)
    text = made.compiled_text()
    for size in (NUM_KERNEL, NUM_TABLE):
        assert messages(text, "all-gather").count(size) == 1  # the weight, and nothing else
        assert size not in messages(text, "all-reduce")
    assert made.dense.kernel.stored.is_fully_replicated


@pytest.mark.parametrize(
    ("optimizer", "shard_state"), [(adam, "optimizer"), slow(adagrad, "all"), slow(adam, "all")]
)
def test_many_steps_are_one_call(optimizer, shard_state, monkeypatch) -> None:
    copies = Made(sg.MirroredStrategy(TWO), optimizer)
    copies.run(4)
    made = Made(sg.MirroredStrategy(TWO, shard_state=shard_state), optimizer)
    program = made.run(1)
    assert isinstance(program.step, ShardedStep)
    calls: list[int] = []
    call = Program._call

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return call(self, *arguments)

    monkeypatch.setattr(Program, "_call", counted)
    (ids,) = flatten_arguments((made.data,), {}, num_replicas=2).split
    stacked = jax.device_put(np.stack([ids] * 3), made.strategy.topology.stacked_steps)
    losses = program.run_many([stacked], [])
    assert [part.shape for part in losses.components] == [(3,), (3,)]
    assert len(calls) == 1
    for one, other in (
        (made.table.embeddings, copies.table.embeddings),
        (made.dense.kernel, copies.dense.kernel),
    ):
        np.testing.assert_allclose(one.value, other.value, rtol=1e-5, atol=1e-6)
    parts = made.rule.variables[-1].stored.addressable_shards  # of the kernel
    assert {part.data.shape for part in parts} == {(WIDTH // 2, WIDTH)}


def test_what_is_kept_elsewhere_too_takes_several_programs() -> None:
    placement = {"embeddings": "central", "kernel": "sharded"}
    made = Made(sg.HybridStrategy(TWO, placement=placement, parameter_device="cpu:2"), adagrad)
    assert type(made.run(1).step) is OffloadedStep


# Sums over replicas and the variables that they update, among others of the same shape.

TOPOLOGY = Topology.of_groups(find_groups([["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]]))
STORE = ShardedStore(TOPOLOGY)
BY_ROWS = STORE.divided(Division((("logical",), ())))
BY_COLUMNS = STORE.divided(Division(((), ("logical",))))
SHAPE = (4, 4)


def variable(store: ShardedStore | None, shape: tuple[int, ...] = SHAPE) -> Any:
    return SimpleNamespace(store=store, shape=shape)


def parts_of(step: Any, num_written: int) -> StepParts:
    """Of a step that gets and returns variables, then gets a value of each replica."""
    jaxpr = jaxpr_of(step, *[jnp.ones(SHAPE)] * (num_written + 1))
    return part_step(jaxpr, [*[False] * num_written, True], [True] * num_written)


def test_gradient_belongs_to_the_variable_that_it_changes() -> None:
    """Also with momentum, a common scale, and the gradients in another order."""

    def step(first: Any, momentum: Any, second: Any, value: Any) -> Any:
        of_second = lax.psum(value * 2.0, REPLICA_AXIS)
        of_first = lax.psum(value * 3.0, REPLICA_AXIS)
        scale = jnp.sum(of_second) + jnp.sum(of_first)
        momentum = momentum * 0.9 + of_first * scale
        return first - momentum, momentum, second - of_second * scale

    parts = parts_of(step, 3)
    written = [variable(BY_ROWS), variable(BY_ROWS), variable(BY_COLUMNS)]
    trace: Any = SimpleNamespace(written=written)
    found = stores_of_sums(trace, parts, STORE)
    assert len(found) == 2
    by_factor = {}
    handed = parts.replica.outvars[len(parts.replica.outvars) - 2 :]
    made = {id(eqn.outvars[0]): eqn for eqn in parts.replica.eqns}
    for store, total in zip(found, handed, strict=True):
        product = made[id(made[id(total)].invars[0])]
        by_factor[float(product.invars[1].val)] = store
    assert by_factor == {2.0: BY_COLUMNS, 3.0: BY_ROWS}


def of_another_shape(weight: Any, value: Any) -> Any:
    return (weight - lax.psum(jnp.sum(value), REPLICA_AXIS),)


def changed_in_shape(weight: Any, value: Any) -> Any:
    return (weight - lax.psum(value, REPLICA_AXIS).reshape(16)[::-1].reshape(SHAPE),)


@pytest.mark.parametrize(
    ("step", "store", "expected"),
    [
        (of_another_shape, BY_ROWS, None),
        (changed_in_shape, BY_COLUMNS, BY_COLUMNS),  # the first store of its shape
        (changed_in_shape, None, None),
    ],
)
def test_sum_has_the_store_of_a_variable_of_its_shape(step, store, expected) -> None:
    trace: Any = SimpleNamespace(written=[variable(store)])
    assert stores_of_sums(trace, parts_of(step, 1), STORE) == [expected]


def test_replicated_variable_is_updated_as_its_slots_are_sharded() -> None:
    divided = SimpleNamespace(store=None, shape=SHAPE, division=Division(((), ("logical",))))
    assert store_for(divided, STORE) == BY_COLUMNS
    assert store_for(variable(None), STORE) is STORE
    assert store_for(variable(BY_ROWS), STORE) is BY_ROWS


# Which replica function ends a program that is planned.


def test_first_function_that_changes_a_trainable_variable_is_taken(pair) -> None:
    with pair.scope():
        trained = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
        counted = sg.Variable(0.0, trainable=False, aggregation=sg.VariableAggregation.MEAN)
    reached: list[str] = []

    def program() -> None:
        pair.run(lambda: counted.assign_add(trained.value))
        reached.append("counted")
        pair.run(lambda x: trained.assign_add(x), args=(2.0,))
        reached.append("trained")

    step = capture(program)
    assert reached == ["counted"]
    assert step is not None
    assert step.trace.written == [trained]
    assert step.strategy is pair
    assert (float(counted.value), float(trained.value)) == (1.0, 1.0)
    step = capture(lambda: pair.run(jnp.negative, args=(1.0,)), takes_all=True)  # any function
    assert step is not None
    assert (step.fn, step.optimizers) == (jnp.negative, ())


def test_error_of_the_program_goes_through(pair) -> None:
    assert not issubclass(StepCaptured, Exception)
    assert capture(lambda: None) is None  # a program that trains nothing
    with pytest.raises(ZeroDivisionError):
        capture(lambda: pair.run(lambda: 1 / 0))
    with pair.scope():
        trained = sg.Variable(1.0, aggregation=sg.VariableAggregation.MEAN)
    pair.run(lambda: trained.assign(2.0))  # and nothing is captured behind it
    assert float(trained.value) == 2.0
