"""Variables in pinned memory of the host: the numbers of mirrored ones, and devices hold none."""

from __future__ import annotations

import gc
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.offloaded_program import OffloadedProgram
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.sharded_program import ShardedProgram
from stratagem.strategies.placement_rules import pinned_host_store

TWO = ["cpu:0", "cpu:1"]
PINNED = "pinned_host"
ROWS, ROW = 8192, 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(22, 64)).astype("float32")
IDS = RNG.integers(0, ROWS, (22,), dtype="int32")
Y = RNG.normal(size=(22, 3)).astype("float32")


def central(devices: list[str] = TWO) -> sg.CentralStorageStrategy:
    return sg.CentralStorageStrategy(devices, PINNED)


def hybrid(devices: list[str] = TWO, **placement: str) -> sg.HybridStrategy:
    return sg.HybridStrategy(devices, placement=placement or {"": PINNED})


STRATEGIES = {
    "central": central,
    "hybrid": hybrid,
    "central, 1": lambda: central(["cpu:0"]),
    "hybrid, 1": lambda: hybrid(["cpu:0"]),
    "hybrid, 4": lambda: hybrid([*TWO, "cpu:2", "cpu:3"]),
    "sharded table": lambda: hybrid(kernel=PINNED, items="sharded"),
    "central table": lambda: hybrid(kernel=PINNED, items="central"),
    "central kernel": lambda: hybrid(items=PINNED, wide="central"),
    "mirrored": lambda: sg.MirroredStrategy(TWO),
    "all on the host": lambda: sg.CentralStorageStrategy(TWO),
}


def made(strategy: sg.Strategy, optimizer: str = "Adam", steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    with strategy.scope():
        features, item = keras.Input((64,)), keras.Input((), dtype="int32")
        hidden = [features, keras.layers.Embedding(ROWS, ROW, name="items")(item)]
        hidden = keras.layers.Concatenate()(hidden)
        hidden = keras.layers.Dense(128, "tanh", name="wide")(hidden)
        hidden = keras.layers.BatchNormalization(name="norm")(hidden)
        hidden = keras.layers.Dropout(0.1)(hidden)
        model = keras.Model([features, item], keras.layers.Dense(3, name="top")(hidden))
        rule = getattr(keras.optimizers, optimizer)(0.01)
        model.compile(rule, "mse", metrics=["mae"], steps_per_execution=steps)
    return model


def fitted(model: keras.Model) -> dict[str, list[float]]:
    return model.fit([X, IDS], Y, batch_size=8, epochs=2, verbose=0, shuffle=False).history


def memory_of(variable: Any) -> str:
    return variable.stored.sharding.memory_kind


class Runs:
    """The programs that `fit` runs: what kind each is, and how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: Counter[type] = Counter()
        call = Program._call

        def counted(program: Any, *arguments: Any) -> Any:
            self.kinds[type(program)] += 1
            return call(program, *arguments)

        monkeypatch.setattr(Program, "_call", counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer", "steps"),
    [
        ("central", "Adagrad", 1),
        *[
            (strategy, optimizer, steps)
            for strategy, optimizer, steps in [
                ("hybrid", "Adam", 3),
                ("hybrid", "Adagrad", 1),
                ("central", "Adam", 3),
                ("hybrid, 1", "Adam", 3),
                ("central, 1", "Adagrad", 1),
                ("hybrid, 4", "Adagrad", 1),
                ("sharded table", "Adafactor", 3),
                ("central table", "Adam", 3),
                ("central kernel", "Adagrad", 1),
            ]
        ],
    ],
)
def test_fit_gives_what_copies_on_all_devices_give(strategy, optimizer, steps) -> None:
    own = made(STRATEGIES[strategy](), optimizer, steps)
    devices = [f"cpu:{index}" for index in range(own.distribute_strategy.num_replicas_in_sync)]
    mirrored = made(sg.MirroredStrategy(devices), optimizer, steps)
    wanted, got = fitted(mirrored), fitted(own)
    assert wanted.keys() == got.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(got[name], values, rtol=1e-5)
    for expected, variable in zip(
        [*mirrored.weights, *mirrored.optimizer.variables],
        [*own.weights, *own.optimizer.variables],
        strict=True,
    ):
        np.testing.assert_allclose(variable.value, expected.value, rtol=1e-5, atol=1e-6)
    x = [X, IDS]
    np.testing.assert_allclose(
        own.evaluate(x, Y, verbose=0), mirrored.evaluate(x, Y, verbose=0), rtol=1e-5
    )
    np.testing.assert_allclose(own.predict(x, verbose=0), mirrored.predict(x, verbose=0), atol=1e-6)
    np.testing.assert_allclose(own(x), own.predict(x, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_what_is_large_is_in_pinned_memory_in_parts_and_tables_are_on_the_host() -> None:
    model = made(central(), "Adagrad")
    assert memory_of(model.get_layer("wide").kernel) == PINNED
    fitted(model)
    places = {
        re.sub(r"^adagrad(_\d+)?/", "", variable.path): (
            memory_of(variable),
            len(variable.stored.devices()),
            variable.stored.addressable_shards[0].data.shape,
        )
        for variable in [*model.trainable_variables, *model.optimizer.variables]
        if "norm" not in variable.path
    }
    table, kernel = ("device", 1, (ROWS, ROW)), (PINNED, 2, (36, 128))
    copied = {
        (): ("iteration", "learning_rate"),
        (128,): ("wide/bias", "wide_bias_accumulator"),
        (128, 3): ("top/kernel", "top_kernel_accumulator"),
        (3,): ("top/bias", "top_bias_accumulator"),
    }
    assert places == {
        "items/embeddings": table,
        "items_embeddings_accumulator": table,
        "wide/kernel": kernel,
        "wide_kernel_accumulator": kernel,
        **{name: ("device", 2, shape) for shape, names in copied.items() for name in names},
    }


def test_devices_hold_nothing_between_steps() -> None:
    """Counted by device and memory after a step: a kernel and what Adam keeps, each in halves."""
    shape = (514, 1034)  # of nothing else in this process
    part = (257, 1034)
    strategy = central()
    with strategy.scope():
        model = keras.Sequential([keras.Input(shape[:1]), keras.layers.Dense(shape[1])])
        model.compile("adam", "mse")
    model.fit(np.zeros((4, shape[0])), np.zeros((4, shape[1])), batch_size=4, verbose=0)
    gc.collect()
    held = Counter(
        (shard.device.id, shard.data.sharding.memory_kind, shard.data.shape)
        for array in jax.live_arrays()
        if array.shape in (shape, part)
        for shard in array.addressable_shards
    )
    assert held == {(0, PINNED, part): 3, (1, PINNED, part): 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "steps", "kind", "num_calls"),
    [
        ("hybrid", 3, ShardedProgram, 2),  # two full batches, and one short one
        ("sharded table", 1, ShardedProgram, 3),
        ("hybrid, 1", 3, ShardedProgram, 2),
        ("central", 3, OffloadedProgram, 3),  # the table is
    ],
)
def test_step_is_one_program_and_many_steps_are_one_call(
    strategy, steps, kind, num_calls, monkeypatch
) -> None:
    model = made(STRATEGIES[strategy](), "Adagrad", steps)
    runs = Runs(monkeypatch)
    model.fit([X, IDS], Y, batch_size=8, verbose=0, shuffle=False)
    assert runs.kinds == {kind: num_calls}
    assert memory_of(model.get_layer("wide").kernel) == PINNED


def test_functions_and_runs_op_by_op_see_the_same_values() -> None:
    strategy = central()
    start = np.arange(2048.0, dtype="float32")
    with strategy.scope():
        value = sg.Variable(start, aggregation="sum")

    def step() -> None:
        value.assign_add(jnp.ones(2048))

    @sg.function
    def twice() -> Any:
        strategy.run(step)
        strategy.run(step)
        return value.value

    np.testing.assert_array_equal(twice(), start + 4)
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    strategy.run(step)
    value.assign_add(jnp.ones(2048))
    np.testing.assert_array_equal(value.value, start + 9)
    np.testing.assert_array_equal(np.asarray(value), start + 9)
    assert memory_of(value) == PINNED


def test_rows_are_read_and_set_outside_of_steps() -> None:
    with hybrid().scope():
        layer = keras.layers.Embedding(ROWS, ROW)
        layer.build()
    table: Any = layer.embeddings
    value = np.array(table.value)
    np.testing.assert_array_equal(layer(IDS), value[IDS])
    table.scatter_add(sg.IndexedSlices(jnp.ones((1, ROW)), jnp.array([5])))
    np.testing.assert_array_equal(layer(np.array([5])), value[[5]] + 1)
    assert memory_of(table) == PINNED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("central", "mirrored"),
        ("mirrored", "hybrid"),
        ("hybrid", "all on the host"),
    ],
)
def test_checkpoints_go_on_under_another_strategy(before, after, tmp_path) -> None:
    first, second = made(STRATEGIES[before]()), made(STRATEGIES[after]())
    fitted(first)
    path = sg.train.Checkpoint(model=first, optimizer=first.optimizer).save(tmp_path / "kept")
    sg.train.Checkpoint(model=second, optimizer=second.optimizer).restore(path)
    first.save(tmp_path / "model.keras")
    saved: Any = keras.saving.load_model(tmp_path / "model.keras")
    for one, other, third in zip(first.weights, second.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
        np.testing.assert_array_equal(one.value, third.value)
    for one, other in zip(first.optimizer.variables, second.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    for one, value in zip(first.weights, first.get_weights(), strict=True):
        np.testing.assert_array_equal(one.value, value)
    fitted(second)


def test_large_variable_without_parts_is_reported_and_each_device_brings_it() -> None:
    strategy = hybrid()
    with (
        strategy.scope(),
        pytest.warns(UserWarning, match=r"\(301, 301\) cannot be sharded over 2"),
    ):
        variable = sg.Variable(np.zeros((301, 301), "float32"), aggregation="sum")

    strategy.run(lambda: variable.assign_add(jnp.ones((301, 301))))
    assert memory_of(variable) == PINNED
    assert {part.data.shape for part in variable.stored.addressable_shards} == {(301, 301)}
    np.testing.assert_array_equal(variable.value, np.full((301, 301), 2.0))


def test_devices_without_pinned_memory_are_reported() -> None:
    class Device:
        def __str__(self) -> str:
            return "old:0"

        def addressable_memories(self) -> list[Any]:
            return [SimpleNamespace(kind="device"), SimpleNamespace(kind="unpinned_host")]

    topology: Any = SimpleNamespace(is_abstract=False, local_devices=(Device(),))
    message = r"old:0 has no 'pinned_host' memory; its memories are \['device', 'unpinned"
    with pytest.raises(ValueError, match=message):
        pinned_host_store(topology)
