"""Steps with variables in parts on the replicas' devices: one program, and who gets what in it."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.offloaded_program import OffloadedProgram
from stratagem.execution.programs.sharded_program import ShardedProgram
from stratagem.execution.tracing.arguments import flatten_arguments

TWO = ["cpu:0", "cpu:1"]
WIDTH, ROWS, ROW = 64, 8192, 8
NUM_KERNEL, NUM_TABLE = WIDTH * WIDTH, ROWS * ROW


class Made:
    """A table and a kernel under a strategy, and one step of them.

    Args:
        strategy: the strategy.
        optimizer: of Keras.
    """

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
    ("optimizer", "shard_state"),
    [
        (adam, "optimizer"),
        pytest.param(adagrad, "all", marks=pytest.mark.slow),
        pytest.param(adam, "all", marks=pytest.mark.slow),
    ],
)
def test_many_steps_are_one_call(optimizer, shard_state, monkeypatch) -> None:
    copies = Made(sg.MirroredStrategy(TWO), optimizer)
    copies.run(4)
    made = Made(sg.MirroredStrategy(TWO, shard_state=shard_state), optimizer)
    program = made.run(1)
    assert isinstance(program, ShardedProgram)
    calls: list[int] = []
    call = ShardedProgram._call

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(1)
        return call(self, *arguments)

    monkeypatch.setattr(ShardedProgram, "_call", counted)
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
    assert type(made.run(1)) is OffloadedProgram
