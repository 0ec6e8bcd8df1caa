"""Checkpoints restore under any strategy, by Orbax, and by plain Keras."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.in_memory import MemoryBackup
from stratagem.checkpoint.storage import files
from stratagem.checkpoint.storage.process import wait_for_writing
from tests.unit.checkpoint.groups import Reader

ROWS = np.random.default_rng(0).random((60, 6)).astype("float32")
TARGETS = ROWS.sum(axis=1, keepdims=True)


def make_strategy(name: str) -> Any:
    if name == "one":
        return sg.OneDeviceStrategy("cpu:0")
    return sg.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"][: {"two": 2, "three": 3}[name]])


def build(strategy: Any, seed: int) -> tuple[keras.Model, Any]:
    """A model with batch normalization and Adam, and a sum with per-replica components."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((6,)),
                keras.layers.Dense(8, "tanh"),
                keras.layers.BatchNormalization(synchronized=True),
                keras.layers.Dense(1),
            ]
        )
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        total = sg.Variable(1.0, synchronization="on_read", aggregation="sum")
    return model, total


def train(model: keras.Model) -> np.ndarray:
    """Trains ten steps; returns the losses."""
    history = model.fit(ROWS, TARGETS, batch_size=12, epochs=2, shuffle=False, verbose=0)
    return np.array(history.history["loss"])


def test_sum_is_shared_out_and_mean_is_given_to_each(tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        kinds = {
            name: sg.Variable(0.0, synchronization="on_read", aggregation=name)
            for name in ("sum", "mean", "only_first_replica")
        }

    def count() -> None:
        own = jnp.asarray(sg.get_replica_context().replica_id_in_sync_group, "float32") + 1.0
        for variable in kinds.values():
            variable.assign(own)

    strategy.run(count)
    checkpoint = sg.train.Checkpoint(**kinds)
    path = checkpoint.save(tmp_path / "ckpt")
    for variable in kinds.values():
        variable.assign(9.0)
    checkpoint.restore(path)

    parts = strategy.run(lambda: {name: variable + 0.0 for name, variable in kinds.items()})

    def read(name: str) -> list[float]:
        return [float(part) for part in strategy.local_results(parts[name])]

    assert read("sum") == [1.5, 1.5]
    assert read("mean") == [1.5, 1.5]
    assert read("only_first_replica") == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.skipif(
    tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14),
    reason="this Keras does not read what Orbax wrote",
)
def test_plain_keras_reads_the_model(tmp_path: Path) -> None:
    model, total = build(make_strategy("two"), seed=1)
    train(model)
    path = sg.train.Checkpoint(total=total, net=model).save(tmp_path / "ckpt")

    plain = keras.Sequential(
        [
            keras.layers.Input((6,)),
            keras.layers.Dense(8, "tanh", name=model.layers[0].name),
            keras.layers.BatchNormalization(name=model.layers[1].name),
            keras.layers.Dense(1, name=model.layers[2].name),
        ],
        name=model.name,
    )
    plain.compile("adam", "mse")
    plain.load_weights(path)
    np.testing.assert_allclose(
        plain.predict(ROWS, verbose=0), model.predict(ROWS, verbose=0), atol=1e-6
    )


def test_every_kind_of_object(tmp_path: Path) -> None:
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_dataset(sg.input.Dataset(np.arange(12), batch_size=4))

    def make() -> dict[str, Any]:
        with strategy.scope():
            layer = keras.layers.Dense(3)
            layer.build((None, 2))
            optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
            optimizer.build(layer.trainable_variables)
            return {
                "layer": layer,
                "optimizer": optimizer,
                "metric": keras.metrics.Mean(),
                "step": sg.Variable(0, dtype="int32"),
                "half": sg.Variable(np.zeros((2, 0), "float32"), dtype="bfloat16"),
                "seeds": keras.random.SeedGenerator(5),
                "data": iter(dataset),
            }

    old = make()
    old["metric"].update_state([1.0, 2.0])
    old["step"].assign(41)
    old["optimizer"].iterations.assign(7)
    keras.random.normal((1,), seed=old["seeds"])
    next(old["data"])
    new = make()
    saved, restored = (sg.train.Checkpoint(one.pop("layer"), **one) for one in (old, new))
    restored.restore(saved.save(tmp_path / "ckpt"))
    np.testing.assert_array_equal(restored.root.kernel, saved.root.kernel)
    assert int(new["optimizer"].iterations) == 7
    assert float(new["metric"].result()) == 1.5
    assert int(new["step"]) == 41
    np.testing.assert_array_equal(
        keras.random.normal((3,), seed=new["seeds"]), keras.random.normal((3,), seed=old["seeds"])
    )
    assert str(next(new["data"])) == str(next(old["data"]))


def test_write_and_read_leave_the_counter(tmp_path: Path) -> None:
    step = sg.Variable(3)
    checkpoint = sg.train.Checkpoint(step=step)
    assert checkpoint.save(tmp_path / "a") == str(tmp_path / "a-1")
    assert checkpoint.save(tmp_path / "a") == str(tmp_path / "a-2")
    assert checkpoint.write(tmp_path / "plain") == str(tmp_path / "plain")
    step.assign(0)
    checkpoint.read(tmp_path / "a-1")
    assert (int(step), int(checkpoint.save_counter)) == (3, 2)
    checkpoint.restore(tmp_path / "a-1")
    assert int(checkpoint.save_counter) == 1


def test_layers_of_one_name_are_distinguished(tmp_path: Path) -> None:
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="same")(inputs))
    first, second = sg.Variable(1.0, name="twin"), sg.Variable(2.0, name="twin")
    model.extra = [first, second]
    checkpoint = sg.train.Checkpoint(model=model, a=first, b=second)
    path = checkpoint.save(tmp_path / "ckpt")
    first.assign(8.0)
    second.assign(9.0)
    checkpoint.restore(path)
    assert (float(first.value), float(second.value)) == (1.0, 2.0)


BEHIND = sg.train.CheckpointOptions(enable_async=True)


@pytest.mark.slow
def test_asynchronous_save_writes_the_values_at_its_start(tmp_path: Path) -> None:
    model, total = build(make_strategy("two"), seed=1)
    train(model)
    numbers = np.arange(3)
    tree = {"a": jnp.arange(5.0), "n": 7, "host": numbers, "key": jax.random.key(3)}
    checkpoint = sg.train.Checkpoint(model=model, total=total, tree=tree)
    checkpoint.prepare()
    wanted = [np.array(one.value) for one in [*model.weights, *model.optimizer.variables]]
    path = checkpoint.save(tmp_path / "ckpt", BEHIND)
    train(model)  # while it is written; donates the variables
    numbers += 1
    trained = [np.array(one.value) for one in [*model.weights, *model.optimizer.variables]]
    assert not all(map(np.array_equal, trained, wanted))
    checkpoint.sync()
    other, other_total = build(make_strategy("three"), seed=2)
    restored = sg.train.Checkpoint(model=other, total=other_total, tree=tree)
    restored.restore(path).assert_consumed()
    found = [np.asarray(one.value) for one in [*other.weights, *other.optimizer.variables]]
    for one, value in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, value, rtol=1e-6, atol=1e-7)
    assert restored.tree["n"] == 7
    np.testing.assert_array_equal(restored.tree["host"], [0, 1, 2])
    np.testing.assert_array_equal(restored.tree["a"], np.arange(5.0))
    assert restored.tree["key"] == jax.random.key(3)


def test_write_callbacks_receive_the_path_and_a_restore_waits(tmp_path: Path) -> None:
    written: list[str] = []
    older = sg.train.CheckpointOptions(
        experimental_enable_async_checkpoint=True, experimental_write_callbacks=[written.append]
    )
    now = sg.train.CheckpointOptions(experimental_write_callbacks=[written.append])
    step = sg.Variable(3)
    checkpoint = sg.train.Checkpoint(step=step)
    paths = [checkpoint.save(tmp_path / "ckpt", options) for options in (now, older)]
    step.assign(4)
    checkpoint.restore(paths[1])  # after it is written
    assert int(step) == 3
    assert written == paths


@pytest.mark.parametrize(
    "heard_in",
    [
        pytest.param("run", marks=pytest.mark.slow),
        pytest.param("fit", marks=pytest.mark.slow),
        pytest.param("save", marks=pytest.mark.slow),
        "sync",
        pytest.param("run_steps", marks=pytest.mark.slow),
    ],
)
def test_failure_of_an_asynchronous_save_is_raised_at_the_next_step(
    heard_in: str, tmp_path: Path
) -> None:
    strategy = make_strategy("two")
    model, _ = build(strategy, seed=1)
    train(model)
    (tmp_path / "file").write_text("")
    checkpoint = sg.train.Checkpoint(model=model)
    checkpoint.write(tmp_path / "file" / "ckpt", BEHIND)
    wait_for_writing()
    dataset = strategy.distribute_dataset([np.arange(4)])
    steps: dict[str, Callable[[], Any]] = {
        "run": lambda: strategy.run(lambda: 1),
        "run_steps": lambda: strategy.run_steps(jnp.sum, iter(dataset), 1),
        "fit": lambda: train(model),
        "save": lambda: checkpoint.save(tmp_path / "ckpt"),
        "sync": checkpoint.sync,
    }
    with pytest.raises(OSError, match="could not be written"):
        steps[heard_in]()
    steps[heard_in]()  # once


def test_parts_on_replicas_are_kept_where_there_are_as_many(tmp_path: Path) -> None:
    def part(strategy: Any) -> Any:
        with strategy.scope():
            return sg.Variable(0.0, synchronization="on_read", aggregation="sum")

    def add(variable: Any) -> None:
        replica = sg.get_replica_context().replica_id_in_sync_group
        variable.assign_add(jnp.asarray(replica, "float32") + 1.0)

    strategy = make_strategy("two")
    variable = part(strategy)
    strategy.run(add, args=(variable,))
    checkpoint = sg.train.Checkpoint(variable=variable)
    checkpoint.prepare()
    path = checkpoint.save(tmp_path / "ckpt", BEHIND)
    strategy.run(add, args=(variable,))  # while it is written
    whole, parts = sg.train.CheckpointOptions(), sg.train.CheckpointOptions(restore_components=True)
    for name, options, expected in (
        ("two", parts, [1.0, 2.0]),
        ("two", whole, [1.5, 1.5]),
        ("three", parts, [1.0, 1.0, 1.0]),
    ):
        other = part(make_strategy(name))
        sg.train.Checkpoint(variable=other).restore(path, options)
        assert np.asarray(other.storage).tolist() == expected
        assert float(other.value) == 3.0
    memory = MemoryBackup(sg.train.Checkpoint(variable=variable), tmp_path / "memory")
    memory.save(1)
    variable.assign(9.0)
    assert memory.restore() == 1
    assert np.asarray(variable.storage).tolist() == [2.0, 4.0]


@pytest.mark.parametrize("is_async", [False, True])
def test_saving_and_restoring_leave_memory_to_the_next_step(is_async: bool, tmp_path: Path) -> None:
    """A host view that is kept would cost each later step an extra buffer."""
    strategy = make_strategy("one")
    with strategy.scope():
        variable = sg.Variable(np.zeros(100_000, "float32"))

    def step() -> None:
        variable.assign_add(np.ones(100_000, "float32"))

    def address() -> int:
        return variable.value.addressable_shards[0].data.unsafe_buffer_pointer()

    strategy.run(step)
    checkpoint = sg.train.Checkpoint(variable=variable)
    checkpoint.save(tmp_path / "ckpt", sg.train.CheckpointOptions(enable_async=is_async))
    storage_before = variable.storage
    strategy.run(step)
    assert storage_before.is_deleted()
    checkpoint.sync()
    # A device array in NumPy's memory would cost the next step an extra buffer, too.
    checkpoint.read(checkpoint.write(tmp_path / "other"))
    before = address()
    strategy.run(step)
    assert address() == before


# Restores of a state that does not fit twice into memory.


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """No memory for the old values beside the new ones; the paths of each portion that was read."""
    read: list[set[str]] = []
    original = files.read_arrays

    def recorded(folder: Path, manifest: Any, names: Any, receive: Any) -> Any:
        arrays = original(folder, manifest, names, receive)
        read.append({f"{name}/{path}" for name in arrays for path in arrays[name]})
        return arrays

    monkeypatch.setattr("stratagem.checkpoint.restoration.fits_in_memory", lambda _: False)
    monkeypatch.setattr(files, "read_arrays", recorded)
    monkeypatch.setattr(files, "_PORTION_BYTES", 100)
    return read


@pytest.mark.slow
def test_all_is_restored_in_portions(tmp_path: Path, scarce: list[set[str]]) -> None:
    strategy, source = make_strategy("two"), Reader({"row": 3})
    saved, other = (build(strategy, seed)[0] for seed in (1, 2))
    for model in (saved, other):
        train(model)
    tree = {"w": np.arange(60.0), "step": 5, "none": np.zeros((0, 2))}
    path = sg.train.Checkpoint(model=saved, tree=tree, source=source).save(tmp_path / "ckpt")
    zeros = {"w": np.zeros(60), "step": 0, "none": np.zeros((0, 2))}
    source.state = None
    checkpoint = sg.train.Checkpoint(model=other, tree=zeros, source=source)
    checkpoint.restore(path, sg.train.CheckpointOptions(restore_components=True)).assert_consumed()
    for ours, theirs in zip(other.variables, saved.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(ours.value), np.asarray(theirs.value))
    np.testing.assert_array_equal(checkpoint.tree["w"], tree["w"])
    assert (checkpoint.tree["step"], source.state) == (5, {"row": 3})
    assert len(scarce) > 5
    assert max(len(paths) for paths in scarce) < len(set().union(*scarce)) / 2


def test_damage_of_the_last_array_changes_nothing(tmp_path: Path, scarce: list[set[str]]) -> None:
    variables = {f"v{i}": sg.Variable(np.full(1000, 1.0)) for i in range(4)}
    path = Path(sg.train.Checkpoint(**variables).save(tmp_path / "ckpt"))
    for variable in variables.values():
        variable.assign(jnp.zeros(1000))
    for file in path.glob("v3_state/**/d/*"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)
    with pytest.raises(sg.errors.DataLossError, match="is damaged"):
        sg.train.Checkpoint(**variables).restore(path)
    assert not any(np.any(np.asarray(one.value)) for one in variables.values())
    assert not scarce


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_large_values_are_restored_in_their_dtype_and_change_in_the_next_step(
    devices: list[str], tmp_path: Path
) -> None:
    """The next step gives away their memory; a second restore finds the file as it was."""
    noise = np.random.default_rng(0).standard_normal((600, 1000))
    values = {name: noise.astype(name) for name in ("float32", "float64", "bfloat16")}
    strategy = sg.MirroredStrategy(devices)
    with strategy.scope():
        variable = sg.Variable(values["float32"])
    tree = {"double": values["float64"], "half": jnp.asarray(values["bfloat16"])}
    path = sg.train.Checkpoint(variable=variable, tree=tree).save(tmp_path / "ckpt")
    empty = {name: np.zeros_like(leaf) for name, leaf in tree.items()}
    restored = sg.train.Checkpoint(variable=variable, tree=empty)

    def step() -> None:
        variable.assign(variable.value + 1)

    for _ in range(2):
        variable.assign(np.zeros((600, 1000)))
        restored.restore(path).assert_consumed()
        np.testing.assert_array_equal(variable.value, values["float32"], strict=True)
        np.testing.assert_array_equal(restored.tree["double"], tree["double"], strict=True)
        np.testing.assert_array_equal(restored.tree["half"], values["bfloat16"], strict=True)
        strategy.run(step)
        np.testing.assert_array_equal(variable.value, values["float32"] + np.float32(1))
