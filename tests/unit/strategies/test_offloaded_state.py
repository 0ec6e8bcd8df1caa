"""Variables in pinned memory of the host: the numbers of mirrored ones, and devices hold none."""

from __future__ import annotations

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
from tests.unit.strategies.decoders import compiled_decoder, decoder_strategy
from tests.unit.strategies.test_training import ITEMS, TWO, USERS, Y, made

PINNED = "pinned_host"


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
    "all on the host": lambda: sg.CentralStorageStrategy(TWO, "cpu:2"),
}


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


def test_what_is_large_is_in_pinned_memory_in_parts_and_tables_are_on_the_host() -> None:
    model = made(central(), "Adagrad")
    model.optimizer.build(model.trainable_variables)
    places = {
        re.sub(r"^adagrad(_\d+)?/", "", one.path): (memory_of(one), len(one.stored.devices()))
        for one in [*model.trainable_variables, *model.optimizer.variables]
    }
    for name, place in {
        "items/embeddings": ("device", 1),
        "wide/kernel": (PINNED, 2),
        "wide/bias": ("device", 2),
        "top/kernel": ("device", 2),
    }.items():
        assert places[name] == places[f"{name.replace('/', '_')}_accumulator"] == place
    part = model.get_layer("wide").kernel.stored.addressable_shards[0].data.shape
    assert part == (16, 128)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("central", {(0, PINNED): 3, (1, PINNED): 3}),
        ("all on the host", {(2, "device"): 3}),
        ("mirrored", {(0, "device"): 3, (1, "device"): 3}),
    ],
)
def test_devices_hold_nothing_between_steps(name, expected) -> None:
    """Counted by device and memory after a step: a kernel and what Adam keeps."""
    shape = (514, 1034)  # of nothing else in this process
    with STRATEGIES[name]().scope():
        model = keras.Sequential([keras.Input(shape[:1]), keras.layers.Dense(shape[1])])
        model.compile("adam", "mse")
    model.fit(np.zeros((4, shape[0])), np.zeros((4, shape[1])), batch_size=4, verbose=0)
    gc.collect()
    part = (257, 1034) if name == "central" else shape
    held = Counter(
        (shard.device.id, shard.data.sharding.memory_kind)
        for array in jax.live_arrays()
        if array.shape == shape
        for shard in array.addressable_shards
        if shard.data.shape == part
    )
    assert held == expected


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
    model.fit([USERS, ITEMS], Y, batch_size=8, verbose=0, shuffle=False)
    assert runs.kinds == {kind: num_calls}
    assert memory_of(model.get_layer("wide").kernel) == PINNED


@pytest.mark.parametrize("name", ["central", "all on the host"])
def test_functions_and_runs_op_by_op_see_the_same_values(name) -> None:
    strategy = STRATEGIES[name]()
    start = np.arange(2048.0, dtype="float32")
    with strategy.scope():
        value = sg.Variable(start, aggregation="sum")
    places = value.stored.devices(), memory_of(value)

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
    assert (value.stored.devices(), memory_of(value)) == places


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


def test_a_device_holds_a_part_of_each_dimension() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = compiled_decoder(
            decoder_strategy(2, 4, "all").scope(), keras.optimizers.Adam(), num_layers=1
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


# Optimizer state apart from its variables: where it is stored, and the numbers of one device.

STATE = sg.placement.optimizer_state


def places_of(variables: Any) -> set[str]:
    """Places of large variables."""
    stores = [one.store for one in variables if np.prod(one.shape) >= 1024]
    return {"devices" if one is None else one.memory_kind or "shards" for one in stores}


@pytest.mark.parametrize(
    ("placement", "weights", "state"),
    [
        ({STATE: PINNED}, "devices", PINNED),
        ({STATE: PINNED, "": "sharded"}, "shards", PINNED),
        ({STATE: "sharded", "": PINNED}, PINNED, "shards"),
        ({STATE: "mirrored", "": "sharded"}, "shards", "devices"),
        ({"": "sharded"}, "shards", "shards"),
    ],
)
def test_optimizer_state_has_a_place_of_its_own(placement, weights, state) -> None:
    model = made(sg.HybridStrategy(TWO, placement=placement), "Adam")
    model.optimizer.build(model.trainable_variables)
    assert places_of(model.variables) == {weights}
    assert places_of(model.optimizer.variables) == {state}


def test_state_of_central_variables_stays_with_them() -> None:
    model = made(sg.HybridStrategy(TWO, placement={STATE: PINNED, "items": "central"}), "Adam")
    model.optimizer.build(model.trainable_variables)
    (table,) = model.get_layer("items").variables
    slots: list[Any] = [one for one in model.optimizer.variables if one.shape == table.shape]
    assert {slot.store for slot in slots} == {table.store}


@pytest.mark.parametrize("place", ["central", "server"])
def test_places_of_which_state_alone_has_none(place: str) -> None:
    with pytest.raises(ValueError, match=rf"the place '{place}' for sg.placement.optimizer_state"):
        sg.HybridStrategy(TWO, placement={STATE: place})


def test_optimizer_without_state_is_no_error() -> None:
    model = made(sg.HybridStrategy(TWO, placement={STATE: PINNED}), "SGD")
    model.fit([USERS, ITEMS], Y, batch_size=22, verbose=0)
    assert not STATE(model.variables[0])
