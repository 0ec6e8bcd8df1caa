"""Rows of a table are updated alone where that comes to the same, and only there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.offloaded_program import OffloadedProgram
from stratagem.execution.tracing.remote_state import without_unused
from stratagem.keras.numerics import optimizer as table_rows

TWO = ["cpu:0", "cpu:1"]
NUM_ROWS, WIDTH = 9000, 8
IDS = np.array([[[1, 5], [5, 8999]], [[2, 5], [-3, 1]]], "int32")


OPTIMIZERS = {
    "sgd": (lambda: keras.optimizers.SGD(0.5), True),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.5), True),
    "schedule": (
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)),
        True,
    ),
    "clipped": (lambda: keras.optimizers.Adagrad(0.5, global_clipnorm=0.1), True),
    "scaled": (lambda: keras.optimizers.SGD(0.5, loss_scale_factor=4.0), True),
    "momentum": (lambda: keras.optimizers.SGD(0.5, momentum=0.9), False),
    "decay": (lambda: keras.optimizers.SGD(0.5, weight_decay=0.1), False),
    "average": (lambda: keras.optimizers.SGD(0.5, use_ema=True), False),
    "accumulated": (lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2), False),
    "adam": (lambda: keras.optimizers.Adam(0.5), False),
    "adafactor": (lambda: keras.optimizers.Adafactor(0.5), False),
    "loss scale": (lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5)), False),
}


def trained(strategy: sg.Strategy, make: Any, constraint: Any = None) -> tuple[Any, list[Any]]:
    with strategy.scope():
        table = keras.layers.Embedding(
            NUM_ROWS,
            WIDTH,
            embeddings_initializer=keras.initializers.RandomUniform(seed=1),
            embeddings_constraint=constraint,
        )
        table.build()
        optimizer = make()
        optimizer.build(table.trainable_variables)

    def step(ids: Any) -> Any:
        def loss() -> Any:
            value = keras.ops.sum(table(ids) ** 2 + table(ids[:1] + 1))
            return optimizer.scale_loss(value)

        value, grads = sg.value_and_grad(loss, table.trainable_variables)
        optimizer.apply_gradients(zip(grads, table.trainable_variables, strict=True))
        return value

    count = strategy.num_replicas_in_sync
    parts = strategy.distribute_values_from_function(
        lambda context: jnp.asarray(
            np.concatenate(IDS) if count == 1 else IDS[context.replica_id_in_sync_group]
        )
    )
    for _ in range(3):
        strategy.run(step, args=(parts,))
    return table, list(strategy.executor.programs)


def whole_tables_made(jaxpr: Any) -> int:
    """How many operations make an array of the size of the table, other than by changing rows."""
    jaxpr, _ = without_unused(jaxpr, [True] * len(jaxpr.invars))
    return sum(
        variable.aval.shape == (NUM_ROWS, WIDTH)
        and eqn.primitive.name != "scatter"
        and eqn.params.get("name") != "_stratagem_with_updated_rows"
        for eqn in jaxpr.eqns
        for variable in eqn.outvars
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_whole_updates(name, monkeypatch) -> None:
    make, takes_rows = OPTIMIZERS[name]
    central, (program,) = trained(sg.CentralStorageStrategy(TWO, "cpu:2"), make)
    mirrored, _ = trained(sg.MirroredStrategy(TWO), make)
    monkeypatch.setattr(table_rows, "_may_take_rows", lambda *_: False)
    whole, _ = trained(sg.MirroredStrategy(TWO), make)
    for table in (central, mirrored):
        np.testing.assert_allclose(
            table.embeddings.value, whole.embeddings.value, rtol=1e-5, atol=1e-6
        )
    assert isinstance(program, OffloadedProgram)
    (update,) = program.updates
    assert (whole_tables_made(update.jaxpr) == 0) == takes_rows


def test_copies_are_updated_by_rows() -> None:
    for name, takes_rows in {"adagrad": True, "adam": False}.items():
        _, (program,) = trained(sg.MirroredStrategy(TWO), OPTIMIZERS[name][0])
        assert (whole_tables_made(program.trace.jaxpr.jaxpr) == 0) == takes_rows


def test_weight_decay_may_leave_a_table_out() -> None:
    def make() -> keras.optimizers.Optimizer:
        optimizer = keras.optimizers.SGD(0.5, weight_decay=0.1)
        optimizer.exclude_from_weight_decay(var_names=["embeddings"])
        return optimizer

    _, (program,) = trained(sg.MirroredStrategy(TWO), make)
    assert whole_tables_made(program.trace.jaxpr.jaxpr) == 0


@pytest.mark.slow
def test_table_with_a_constraint_is_updated_whole() -> None:
    make, _ = OPTIMIZERS["sgd"]
    copies, _ = trained(sg.MirroredStrategy(TWO), make, "unit_norm")
    central, (program,) = trained(sg.CentralStorageStrategy(TWO, "cpu:2"), make, "unit_norm")
    np.testing.assert_allclose(central.embeddings.value, copies.embeddings.value, rtol=1e-5)
    assert whole_tables_made(program.updates[0].jaxpr)


@pytest.mark.parametrize(
    "devices", [pytest.param(["cpu:0"], marks=pytest.mark.slow), ["cpu:0", "cpu:1"]]
)
def test_replicas_see_no_table(devices) -> None:
    _, (program,) = trained(sg.CentralStorageStrategy(devices, "cpu:2"), OPTIMIZERS["adagrad"][0])
    assert [variable.path for variable in program.trace.read_only] == []
    shapes = {
        variable.aval.shape
        for eqn in program.trace.jaxpr.jaxpr.eqns
        for variable in (*eqn.invars, *eqn.outvars)
    }
    assert (NUM_ROWS, WIDTH) not in shapes
    assert {
        device.id
        for array in jax.live_arrays()
        if array.shape == (NUM_ROWS, WIDTH)
        for device in array.devices()
    } >= {2}
