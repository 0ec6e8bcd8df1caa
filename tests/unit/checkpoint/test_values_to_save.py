"""Asynchronous saves of values on accelerators, for which virtual CPU devices stand in."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint import checkpoint as values_to_save
from stratagem.checkpoint import device_copies
from stratagem.checkpoint.storage import staging as pending
from stratagem.checkpoint.storage.process import storage_process
from tests.unit.checkpoint.accelerators import stand_in

BEHIND = sg.train.CheckpointOptions(enable_async=True)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds back all transfers until it is set; the thread that writes waits."""
    opened = threading.Event()
    land = pending._land

    def land_later(*arguments: Any) -> None:
        assert opened.wait(60)
        land(*arguments)

    monkeypatch.setattr(pending, "_land", land_later)
    return opened


def trained_model() -> Any:
    with sg.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3)])
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.slow
def test_steps_that_follow_do_not_change_what_is_saved(tmp_path, monkeypatch, gate) -> None:
    stand_in(monkeypatch)
    model = trained_model()
    rows = np.random.default_rng(0).random((32, 4)).astype("float32")
    model.fit(rows, rows[:, :3], epochs=1, verbose=0)
    numbers = np.arange(3)
    checkpoint = sg.train.Checkpoint(
        model=model, tree={"a": jnp.arange(5.0), "n": 7, "host": numbers, "key": jax.random.key(3)}
    )
    checkpoint.prepare()
    checkpoint.sync()
    num_compiled = device_copies._program.cache_info().misses
    wanted = [np.array(one.value) for one in [*model.variables, *model.optimizer.variables]]
    path = checkpoint.write(tmp_path / "ckpt", BEHIND)
    model.fit(rows, rows[:, :3], epochs=2, verbose=0)  # donates the variables
    numbers += 1
    assert not Path(path).exists()
    assert device_copies._program.cache_info().misses == num_compiled  # by `prepare`
    trained = [np.array(one.value) for one in [*model.variables, *model.optimizer.variables]]
    assert not all(map(np.array_equal, trained, wanted))
    gate.set()
    checkpoint.sync()
    checkpoint.read(path).assert_consumed()
    found = [np.array(one.value) for one in [*model.variables, *model.optimizer.variables]]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other, strict=True)
    assert checkpoint.tree["n"] == 7
    np.testing.assert_array_equal(checkpoint.tree["host"], [0, 1, 2])
    np.testing.assert_array_equal(checkpoint.tree["a"], np.arange(5.0))
    assert checkpoint.tree["key"] == jax.random.key(3)


def test_components_of_replicas_are_saved_as_they_were(tmp_path, monkeypatch, gate) -> None:
    stand_in(monkeypatch)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        counts = sg.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)

    def add() -> None:
        replica_id: Any = sg.get_replica_context().replica_id_in_sync_group
        counts.assign_add(keras.ops.cast(replica_id, "float32") + 1)

    strategy.run(add)
    checkpoint = sg.train.Checkpoint(counts=counts)
    path = checkpoint.write(tmp_path / "ckpt", BEHIND)
    strategy.run(add)
    gate.set()
    checkpoint.sync()
    checkpoint.read(path, sg.train.CheckpointOptions(restore_components=True)).assert_consumed()
    assert np.asarray(counts.storage).tolist() == [1, 2]


def test_save_waits_for_the_earlier_one_before_it_copies(tmp_path, monkeypatch, gate) -> None:
    stand_in(monkeypatch)
    step = sg.Variable(np.arange(4.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    done: list[str] = []
    copy = values_to_save.copy_on_devices
    monkeypatch.setattr(
        values_to_save, "copy_on_devices", lambda arrays: done.append("copied") or copy(arrays)
    )
    options = sg.train.CheckpointOptions(
        enable_async=True, experimental_write_callbacks=[lambda path: done.append("written")]
    )
    first = checkpoint.write(tmp_path / "first", options)
    step.assign_add(np.ones(4))
    threading.Timer(0.05, gate.set).start()
    second = checkpoint.write(tmp_path / "second", options)
    step.assign_add(np.ones(4))
    checkpoint.sync()
    assert done == ["copied", "written", "copied", "written"]
    for path, wanted in ((first, 0), (second, 1)):
        checkpoint.read(path)
        np.testing.assert_array_equal(step.value, np.arange(4.0) + wanted)


def test_values_that_do_not_fit_on_the_device_are_saved_at_once(tmp_path, monkeypatch) -> None:
    stand_in(monkeypatch, limit_bytes=64)
    large, small = sg.Variable(np.arange(99.0, dtype="float32")), sg.Variable(np.float32(2))
    checkpoint = sg.train.Checkpoint(large=large, small=small)
    path = checkpoint.write(tmp_path / "ckpt", BEHIND)
    for variable in (large, small):
        variable.assign(keras.ops.zeros_like(variable.value))
    checkpoint.sync()
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(large.value, np.arange(99.0))
    assert float(small.value) == 2


def test_save_without_memory_on_the_host_waits_for_the_write(tmp_path, monkeypatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr("stratagem.checkpoint.saving.has_room_for_copy", lambda size_bytes: False)
    step = sg.Variable(np.arange(4.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    path = checkpoint.write(tmp_path / "ckpt", BEHIND)
    step.assign(np.zeros(4))
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(step.value, np.arange(4.0))


def test_failed_transfer_is_raised_by_the_next_sync(tmp_path, monkeypatch) -> None:
    stand_in(monkeypatch)
    seen: list[Any] = []

    def fail(target: object, index: object, piece: Any) -> None:
        seen.append(piece)
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    monkeypatch.setattr(pending, "_land", fail)
    checkpoint = sg.train.Checkpoint(step=sg.Variable(np.arange(4.0, dtype="float32")))
    checkpoint.write(tmp_path / "ckpt", BEHIND)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is lost"):
        checkpoint.sync()
    assert not (tmp_path / "ckpt").exists()
    assert all(piece.is_deleted() for piece in seen)
    assert storage_process().is_alive


def test_synchronous_save_copies_nothing_on_devices(tmp_path, monkeypatch) -> None:
    stand_in(monkeypatch)
    monkeypatch.setattr(values_to_save, "copy_on_devices", None)
    step = sg.Variable(np.arange(4.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    path = checkpoint.write(tmp_path / "ckpt")
    step.assign(np.zeros(4))
    checkpoint.read(path).assert_consumed()
    np.testing.assert_array_equal(step.value, np.arange(4.0))
