"""A table larger than a limit of the replicas' devices: which strategies keep to it, measured.

The host is `cpu:0`, and the devices of the replicas are others, of which one is JAX's default, as a
GPU is. What is alive on them is counted at many moments, and of every program that ran there what
the compiler says: arguments, results and temporaries.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import keras
import numpy as np
import pytest

import stratagem as sg

NUM_ROWS, WIDTH = 20_012, 32  # of nothing else in this process
TABLE_BYTES = 4 * NUM_ROWS * WIDTH
LIMIT_BYTES = 3 * TABLE_BYTES // 4
FOUR = ["cpu:1", "cpu:2", "cpu:3", "cpu:4"]
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, NUM_ROWS, (22, 3), dtype="int32")
IDS[::3, 0] = 7
Y = RNG.normal(size=(22, 1)).astype("float32")


@dataclasses.dataclass
class Memory:
    """Bytes on the replicas' devices, at most, and where that was.

    Args:
        devices: those of the replicas.
    """

    devices: frozenset[jax.Device]
    peak_bytes: int = 0
    where: str = ""
    _known: list[Any] = dataclasses.field(default_factory=list[Any])
    _before: Counter[jax.Device] = dataclasses.field(default_factory=Counter[jax.Device])

    def __post_init__(self) -> None:
        self._before = self.alive()  # of other tests
        self._known = self._programs()

    def alive(self) -> Counter[jax.Device]:
        """Counts the bytes of all arrays, by device."""
        places: dict[tuple[jax.Device, int], int] = {}  # several arrays may be views of one
        for array in jax.live_arrays():
            for shard in array.addressable_shards:
                try:
                    place = shard.device, shard.data.unsafe_buffer_pointer()
                except jax.errors.JaxRuntimeError:
                    continue  # a view of memory that a step has taken over
                places[place] = max(places.get(place, 0), shard.data.nbytes)
        counted: Counter[jax.Device] = Counter()
        for (device, _), num_bytes in places.items():
            counted[device] += num_bytes
        return counted

    def look(self, moment: str) -> None:
        """Notes what is alive now, and what the programs take that ran since it was last asked."""
        counted = self.alive()
        for device in self.devices:
            self._note(counted[device] - self._before[device], f"arrays, {moment}")
        programs = self._programs()
        known = set(map(id, self._known))
        for program in programs:
            if id(program) not in known and not self.devices.isdisjoint(program.local_devices()):
                size = program.get_compiled_memory_stats()
                taken = size.argument_size_in_bytes + size.output_size_in_bytes
                taken += size.temp_size_in_bytes - size.alias_size_in_bytes
                self._note(taken, f"{program.hlo_modules()[0].name}, {moment}")
        self._known = programs  # kept, so that none gets the id of another

    def _note(self, num_bytes: int, where: str) -> None:
        if num_bytes > self.peak_bytes:
            self.peak_bytes, self.where = num_bytes, where

    def _programs(self) -> list[Any]:
        return jax.devices()[0].client.live_executables()


class Looking(keras.callbacks.Callback):
    """Looks before and after every step."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self._memory = memory

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._memory.look(f"before step {batch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._memory.look(f"after step {batch}")


def made(scope: contextlib.AbstractContextManager[Any]) -> keras.Model:
    initializers = keras.initializers
    with scope:
        ids = keras.Input((3,), dtype="int32")
        table = keras.layers.Embedding(
            NUM_ROWS, WIDTH, initializers.RandomUniform(seed=1), name="table"
        )
        top = keras.layers.Dense(1, kernel_initializer=initializers.GlorotUniform(seed=2))
        model = keras.Model(ids, top(keras.layers.Flatten()(table(ids))))
        model.compile(keras.optimizers.Adagrad(0.1), "mse", metrics=["mae"])
    return model


def used(model: keras.Model, memory: Memory, folder: Path) -> None:
    """Does with a model what one does, and looks after each thing."""
    memory.look("built")
    folder.mkdir(exist_ok=True)
    fit: Any = {"batch_size": 8, "verbose": 0, "shuffle": False}
    watching = [Looking(memory), keras.callbacks.EarlyStopping("loss", restore_best_weights=True)]
    things: dict[str, Callable[[], Any]] = {
        "fit": lambda: model.fit(IDS, Y, epochs=2, callbacks=watching, **fit),
        "evaluate": lambda: model.evaluate(IDS, Y, batch_size=8, verbose=0),
        "predict": lambda: model.predict(IDS, batch_size=8, verbose=0),
        "save": lambda: model.save(folder / "model.keras"),
        "save_weights": lambda: model.save_weights(folder / "of.weights.h5"),
        "load_weights": lambda: model.load_weights(folder / "of.weights.h5"),
        "write": lambda: sg.Checkpoint(model=model).write(folder / "checkpoint"),
        "read": lambda: sg.Checkpoint(model=model).read(folder / "checkpoint"),
        "fit again": lambda: model.fit(IDS, Y, **fit),
    }
    for name, do in things.items():
        do()
        memory.look(name)


@pytest.fixture
def memory(monkeypatch) -> Iterator[Memory]:
    """Looks after each transfer, too: what is there for a moment only began as one."""
    jax.clear_caches()  # a program that another test has compiled would not be seen
    first, *others = [device for device in jax.devices() if device.id in (1, 2, 3, 4)]
    measured = Memory(frozenset((first, *others)))
    put = jax.device_put

    def watched(*args: Any, **kwargs: Any) -> Any:
        result = put(*args, **kwargs)
        measured.look("transfer")
        return result

    monkeypatch.setattr(jax, "device_put", watched)
    with jax.default_device(first):
        yield measured


CENTRAL: dict[str, Callable[[], sg.Strategy]] = {
    "central": lambda: sg.CentralStorageStrategy(FOUR),
    "hybrid, central": lambda: sg.HybridStrategy(FOUR, placement={"table": "central"}),
}
PARTED: dict[str, Callable[[], sg.Strategy]] = {
    "hybrid, sharded": lambda: sg.HybridStrategy(FOUR, placement={"table": "sharded"}),
    "all state": lambda: sg.MirroredStrategy(FOUR, shard_state="all"),
}


@pytest.mark.slow
def test_copies_do_not_keep_to_the_limit(memory) -> None:
    model = made(sg.MirroredStrategy(FOUR).scope())
    memory.look("built")
    assert memory.peak_bytes >= TABLE_BYTES > LIMIT_BYTES
    model.fit(IDS[:8], Y[:8], verbose=0)
    memory.look("fit")
    assert memory.peak_bytes >= 2 * TABLE_BYTES  # with what Adagrad keeps


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CENTRAL, *PARTED])
def test_whatever_is_done_keeps_to_the_limit_and_gives_what_one_device_gives(
    name, memory, tmp_path
) -> None:
    model = made((CENTRAL | PARTED)[name]().scope())
    used(model, memory, tmp_path)
    assert memory.peak_bytes < LIMIT_BYTES < TABLE_BYTES, memory.where
    alone = made(contextlib.nullcontext())
    used(alone, Memory(frozenset()), tmp_path / "alone")
    for wanted, got in zip(alone.weights, model.weights, strict=True):
        np.testing.assert_allclose(got.numpy(), wanted.numpy(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", CENTRAL)
def test_reading_a_table_on_the_host_copies_it_nowhere(name, memory) -> None:
    with CENTRAL[name]().scope():
        layer = keras.layers.Embedding(NUM_ROWS, WIDTH, name="table")
        layer.build()
    layer.set_weights([np.ones((NUM_ROWS, WIDTH), "float32")])
    assert float(layer.embeddings.value[-1, -1]) == 1.0
    assert float(layer(np.array([NUM_ROWS - 1]))[0, 0]) == 1.0
    memory.look("read")
    assert memory.peak_bytes < LIMIT_BYTES, memory.where


@pytest.mark.parametrize("name", [*CENTRAL, "hybrid, sharded"])
def test_table_of_given_numbers_goes_to_its_place_by_the_host(name, memory) -> None:
    with (CENTRAL | PARTED)[name]().scope():
        table = sg.Variable(np.ones((NUM_ROWS, WIDTH), "float32"), name="table")
    memory.look("made")
    assert memory.peak_bytes < LIMIT_BYTES, memory.where
    np.testing.assert_array_equal(table.numpy(), np.ones((NUM_ROWS, WIDTH)))
