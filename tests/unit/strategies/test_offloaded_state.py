"""Variables in pinned memory of the host: the numbers of mirrored ones, and devices hold none."""

from __future__ import annotations

import contextlib
import functools
import gc
import re
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.execution.programs.offloaded_step import OffloadedStep
from stratagem.execution.programs.program import Program
from stratagem.execution.programs.sharded_step import ShardedStep
from stratagem.strategies.placement import pinned_host_store
from tests.unit.strategies.decoders import (
    LAYOUTS,
    WORDS,
    compiled_decoder,
    fit_decoder,
    largest_difference,
)

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
            self.kinds[type(program.step)] += 1
            return call(program, *arguments)

        monkeypatch.setattr(Program, "_call", counted)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "optimizer", "steps"),
    [
        ("central", "Adam", 3),
        ("hybrid, 1", "Adam", 3),
        ("central, 1", "Adagrad", 1),
        ("hybrid, 4", "Adagrad", 1),
        ("sharded table", "Adafactor", 3),
        ("central table", "Adam", 3),
        ("central kernel", "Adagrad", 1),
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
        ("hybrid", 3, ShardedStep, 2),  # two full batches, and one short one
        ("sharded table", 1, ShardedStep, 3),
        ("hybrid, 1", 3, ShardedStep, 2),
        ("central", 3, OffloadedStep, 3),  # the table is
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
    [("central", "mirrored"), ("mirrored", "hybrid"), ("hybrid", "all on the host")],
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


# State sharded over replicas and over a replica's devices: the numbers of one device.

OPTIMIZERS = {
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    # The usual epsilon makes numbers of rounding errors where gradients are almost zero.
    "Adam": lambda: keras.optimizers.Adam(1e-3, epsilon=1e-4, global_clipnorm=1.0),
}


def strategy_of(replicas: int, model: int, shard_state: str | None) -> sg.Strategy:
    names = [f"cpu:{index}" for index in range(replicas * model)]
    return sg.MirroredStrategy(
        names, devices_per_replica=model, shard_state=shard_state, layout_map=LAYOUTS
    )


@functools.cache
def alone(optimizer: str) -> tuple[keras.Model, list[float]]:
    model = compiled_decoder(contextlib.nullcontext(), OPTIMIZERS[optimizer]())
    return model, fit_decoder(model)


def assert_like_one_device(strategy: sg.Strategy, optimizer: str, **options: Any) -> keras.Model:
    model = compiled_decoder(strategy.scope(), OPTIMIZERS[optimizer](), **options)
    losses = fit_decoder(model)
    reference, expected = alone(optimizer)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert largest_difference(model, reference) < 1e-5
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "replicas", "model", "shard_state"),
    [
        ("momentum", 2, 2, "all"),
        ("momentum", 4, 1, "optimizer"),
        ("momentum", 2, 4, None),
        ("Adam", 1, 4, None),
        ("Adam", 2, 4, "optimizer"),
        ("Adam", 4, 2, "all"),
        ("Adam", 2, 1, "all"),
    ],
)
@pytest.mark.filterwarnings("ignore:Variable 'attention_0/key/kernel':UserWarning")
def test_training_is_that_of_one_device(optimizer, replicas, model, shard_state) -> None:
    assert_like_one_device(strategy_of(replicas, model, shard_state), optimizer)


@pytest.mark.slow
def test_steps_in_one_call_are_those_of_one_device() -> None:
    assert_like_one_device(strategy_of(2, 2, "all"), "Adam", steps_per_execution=2)


def test_a_device_holds_a_part_of_each_dimension() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled_decoder(
            strategy_of(2, 4, "all").scope(), keras.optimizers.Adam(), num_layers=1
        )
        model.optimizer.build(model.trainable_variables)
    texts = [str(one.message) for one in caught if "layout_map" in str(one.message)]
    assert len(texts) == 1  # key and value heads
    assert "'attention_0/key/kernel' of shape (64, 2, 16) cannot be divided" in texts[0]
    assert "2 over 4 devices (axis 1, 'logical'), which leaves 2 parts" in texts[0]
    assert "A device holds 4.0 KiB of it instead of 2.0 KiB" in texts[0]
    held = {}
    for variable in [*model.weights, *model.optimizer.variables]:
        parts = variable.stored.addressable_shards
        held[variable.path] = np.prod(variable.shape) / np.prod(parts[0].data.shape)
    for name in (
        "logits/kernel",
        "words/embeddings",
        "attention_0/query/kernel",
        "up_0/kernel",
        "down_0/kernel",
    ):
        assert held[name] == 8
        slots = [path for path in held if path.endswith(f"{name.replace('/', '_')}_momentum")]
        assert [held[path] for path in slots] == [8]
    assert held["attention_0/key/kernel"] == 4
    assert held["logits/kernel"] == 8  # no rule, so that it is in parts as other state is
    assert held["up_0/bias"] == 4


@pytest.mark.slow
@pytest.mark.parametrize("opened_in", [(4, 1, None), (4, 2, "optimizer")])
def test_checkpoint_is_opened_by_other_shapes(tmp_path, opened_in) -> None:
    build = functools.partial(compiled_decoder, num_layers=1)
    first = build(strategy_of(2, 2, "all").scope(), OPTIMIZERS["momentum"]())
    second = build(strategy_of(*opened_in).scope(), OPTIMIZERS["momentum"]())
    for model in (first, second):
        model.optimizer.build(model.trainable_variables)
    for seed, variable in enumerate([*first.weights, *first.optimizer.variables[2:]]):
        variable.assign(np.random.default_rng(seed).normal(scale=0.1, size=variable.shape))
    sg.Checkpoint(model=first).write(tmp_path / "state")
    sg.Checkpoint(model=second).read(tmp_path / "state")
    assert largest_difference(second, first) == 0
    second.set_weights([np.zeros(one.shape) for one in first.weights])
    second.set_weights(first.get_weights())
    assert largest_difference(second, first) == 0
    if opened_in[1] == 1:
        first.save(tmp_path / "model.keras")
        plain = keras.models.load_model(tmp_path / "model.keras")
        np.testing.assert_allclose(
            plain.predict(WORDS, verbose=0), first.predict(WORDS, verbose=0), rtol=1e-4, atol=1e-5
        )


def test_replica_function_run_op_by_op_gives_the_same() -> None:
    strategy = sg.MirroredStrategy(
        [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"]],
        shard_state="all",
        layout_map={"kernel": (None, "logical")},
    )
    with strategy.scope():
        kernel = sg.Variable(
            np.ones((64, 32)), name="kernel", aggregation=sg.VariableAggregation.SUM
        )

    def step() -> Any:
        rank = sg.get_replica_context().replica_id_in_sync_group
        kernel.assign_add(keras.ops.full((64, 32), 1.0 + keras.ops.cast(rank, "float32")))
        return keras.ops.sum(kernel.value)

    strategy.run(step)
    compiled = np.asarray(kernel)
    kernel.assign(np.ones((64, 32)))
    sg.config.run_eagerly(True)
    try:
        strategy.run(step)
    finally:
        sg.config.run_eagerly(False)
    np.testing.assert_array_equal(kernel, compiled)
    np.testing.assert_array_equal(compiled, np.full((64, 32), 4.0))


@pytest.mark.slow
def test_map_of_keras_is_taken_as_it_is() -> None:
    """Weights by both axes, as in KerasHub's maps; the mesh says what a replica is."""
    mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], [f"cpu:{i}" for i in range(8)])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["words/embeddings"] = ("model", "batch")
    layouts[".*/(query|key|value)/kernel"] = ("model", "batch", None)
    layouts[".*/attention_output/kernel"] = ("model", None, "batch")
    layouts["up_[0-9]/kernel"] = ("batch", "model")
    layouts["down_[0-9]/kernel"] = ("model", "batch")
    model = assert_like_one_device(sg.MirroredStrategy(layout_map=layouts), "Adam")
    (up,) = [one for one in model.weights if one.path == "up_0/kernel"]
    assert {shard.data.shape for shard in up.stored.addressable_shards} == {(32, 64)}


# Optimizer state apart from its variables: where it is stored, and the numbers of one device.

STATE = sg.placement.optimizer_state
OTHER_IDS = RNG.integers(0, 8192, (22,), dtype="int32")


def made_for_state(strategy: sg.Strategy | None, optimizer: Any, steps: int = 1) -> keras.Model:
    keras.utils.set_random_seed(3)
    with (strategy or sg.get_strategy()).scope():
        features, item = keras.Input((64,)), keras.Input((), dtype="int32")
        hidden = [features, keras.layers.Embedding(8192, 8, name="items")(item)]
        hidden = keras.layers.Concatenate()(hidden)
        hidden = keras.layers.Dense(64, activation="relu", name="wide")(hidden)
        model = keras.Model([features, item], keras.layers.Dense(3, name="top")(hidden))
        model.compile(optimizer(), "mse", steps_per_execution=steps)
    return model


def fitted_state(model: keras.Model) -> list[np.ndarray]:
    model.fit([X, OTHER_IDS], Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    return [np.asarray(one.value) for one in [*model.variables, *model.optimizer.variables]]


def adam() -> keras.optimizers.Optimizer:
    # The usual epsilon makes numbers of rounding errors where gradients are almost zero: with one
    # core, where XLA adds in another order, one of 4,608 was off by 1.2e-4.
    return keras.optimizers.Adam(0.01, epsilon=1e-4)


def adagrad() -> keras.optimizers.Optimizer:
    return keras.optimizers.Adagrad(0.1)


CASES = [
    ({STATE: "pinned_host"}, adam, 1),
    pytest.param({STATE: "pinned_host", "": "sharded"}, adam, 3, marks=pytest.mark.slow),
    pytest.param({STATE: "sharded", "wide": "pinned_host"}, adam, 1, marks=pytest.mark.slow),
    pytest.param({STATE: "mirrored", "": "sharded"}, adagrad, 3, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("placement", "optimizer", "steps"), CASES)
def test_numbers_are_those_of_one_device(placement: Any, optimizer: Any, steps: int) -> None:
    strategy = sg.HybridStrategy(TWO, placement=placement)
    values = fitted_state(made_for_state(strategy, optimizer, steps))
    of_one_device = fitted_state(made_for_state(None, optimizer))
    for value, expected in zip(values, of_one_device, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def _memories(model: keras.Model) -> tuple[set[str], set[str]]:
    """Memory of large weights, and of their optimizer state."""
    model.optimizer.build(model.trainable_variables)
    weights, state = (
        {_memory(one) for one in variables if np.prod(one.shape) >= 1024}
        for variables in (model.variables, model.optimizer.variables)
    )
    return weights, state


def _memory(variable: Any) -> str:
    store = variable.store
    return "devices" if store is None else store.memory_kind or "shards"


@pytest.mark.parametrize(
    ("placement", "weights", "state"),
    [
        ({STATE: "pinned_host"}, {"devices"}, {"pinned_host"}),
        ({STATE: "pinned_host", "": "sharded"}, {"shards"}, {"pinned_host"}),
        ({STATE: "sharded", "": "pinned_host"}, {"pinned_host"}, {"shards"}),
        ({STATE: "mirrored", "": "sharded"}, {"shards"}, {"devices"}),
        ({"": "sharded"}, {"shards"}, {"shards"}),
    ],
)
def test_optimizer_state_has_a_place_of_its_own(placement: Any, weights: Any, state: Any) -> None:
    model = made_for_state(sg.HybridStrategy(TWO, placement=placement), adam)
    assert _memories(model) == (weights, state)


def test_state_of_central_variables_stays_with_them() -> None:
    strategy = sg.HybridStrategy(TWO, placement={STATE: "pinned_host", "items": "central"})
    model = made_for_state(strategy, adam)
    model.optimizer.build(model.trainable_variables)
    (table,) = model.get_layer("items").variables
    slots: list[Any] = [one for one in model.optimizer.variables if one.shape == table.shape]
    assert {slot.store for slot in slots} == {table.store}


@pytest.mark.parametrize("place", ["central", "server"])
def test_places_of_which_state_alone_has_none(place: str) -> None:
    with pytest.raises(ValueError, match=rf"the place '{place}' for sg.placement.optimizer_state"):
        sg.HybridStrategy(TWO, placement={STATE: place})


def test_optimizer_without_state_is_no_error() -> None:
    strategy = sg.HybridStrategy(TWO, placement={STATE: "pinned_host"})
    model = made_for_state(strategy, lambda: keras.optimizers.SGD(0.1))
    model.fit([X, OTHER_IDS], Y, batch_size=22, verbose=0)
    assert not STATE(model.variables[0])
