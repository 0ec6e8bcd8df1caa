"""Asynchronous saves of values on accelerators, for which virtual CPU devices stand in."""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import stratagem as sg
from stratagem.checkpoint import checkpoint as values_to_save
from stratagem.checkpoint import device_copies
from stratagem.checkpoint import device_copies as device_room
from stratagem.checkpoint.device_copies import (
    DeviceRoom,
    are_on_accelerator,
    copy_on_devices,
    keep_on_device,
    read_stats,
)
from stratagem.checkpoint.storage import staging as pending
from stratagem.checkpoint.storage.process import storage_process
from stratagem.checkpoint.storage.staging import PendingArray
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


# Checkpoints that are missing, damaged or foreign, and folders that cannot be written.


def test_unknown_object_name_tells_those_that_are_there(tmp_path: Path) -> None:
    path = sg.train.Checkpoint(step=sg.Variable(1)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="holds no epoch") as caught:
        sg.train.Checkpoint(epoch=sg.Variable(1)).restore(path)
    assert "save_counter, step" in str(caught.value)


def test_no_such_checkpoint_names_those_beside_it(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    checkpoint.save(tmp_path / "ckpt")
    with pytest.raises(sg.errors.NotFoundError, match=r"does not exist") as caught:
        checkpoint.restore(tmp_path / "ckpt-7")
    assert "ckpt-1" in str(caught.value)


def test_unfinished_checkpoint_is_not_found(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    (path / "commit_success.txt").unlink()
    with pytest.raises(sg.errors.NotFoundError, match="is not a complete checkpoint"):
        checkpoint.restore(path)


def error_of(work: Callable[[], None]) -> Exception | None:
    try:
        work()
    except (sg.errors.DataLossError, sg.errors.NotFoundError) as error:
        return error
    return None


def test_every_damaged_file_that_is_read_is_noticed(tmp_path: Path) -> None:
    """Truncated, changed or deleted files raise an error, or a second copy is read."""
    step = sg.Variable(np.arange(3000.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(step=step)
    whole = Path(checkpoint.save(tmp_path / "ckpt"))
    wanted = np.asarray(step.value)
    noticed = 0
    for file in sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file()):
        if not str(file).startswith(("step", "_CHECKPOINT")):
            continue
        for damage in ("cut", "flipped", "gone"):
            copy = tmp_path / "copy"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(whole, copy)
            content = bytearray((copy / file).read_bytes())
            if damage == "gone":
                (copy / file).unlink()
            else:
                content[len(content) // 2] ^= 0xFF
                keep = len(content) // 2 if damage == "cut" else len(content)
                (copy / file).write_bytes(content[:keep])
            step.assign(np.zeros(3000))
            error = error_of(lambda copy=copy: checkpoint.restore(copy))
            if error is not None:
                assert str(copy) in str(error)
                noticed += 1
                assert not np.any(np.asarray(step.value)), (file, damage)
            else:
                np.testing.assert_array_equal(step.value, wanted, err_msg=f"{file} {damage}")
    assert noticed >= 9


def test_later_format_and_foreign_checkpoint_are_refused(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint.experimental.v1")
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    ocp.save_checkpointables(tmp_path / "theirs", {"x": {"y": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"was not written by sg\.train\.Checkpoint"):
        checkpoint.restore(tmp_path / "theirs")
    ocp.save_checkpointables(
        tmp_path / "later", {"x": {"y": np.zeros(2)}}, custom_metadata={"format": 99}
    )
    with pytest.raises(ValueError, match="has format 99"):
        checkpoint.restore(tmp_path / "later")


def test_name_that_is_taken_is_left_as_it_is(tmp_path: Path) -> None:
    step = sg.Variable(1, dtype="int32")
    checkpoint = sg.train.Checkpoint(step=step)
    checkpoint.write(tmp_path / "ckpt")
    step.assign(2)
    with pytest.raises(FileExistsError, match="already exists"):
        checkpoint.write(tmp_path / "ckpt")
    checkpoint.read(tmp_path / "ckpt")
    assert int(step) == 1


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(1))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written"):
        checkpoint.save(tmp_path / "file" / "ckpt")
    assert int(checkpoint.save_counter) == 0


def test_training_waits_for_an_asynchronous_save_without_memory_for_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes_bytes: list[int] = []
    monkeypatch.setattr("stratagem.checkpoint.saving.has_room_for_copy", sizes_bytes.append)
    checkpoint = sg.train.Checkpoint(v=sg.Variable(np.arange(1000.0, dtype="float32")))
    options = sg.train.CheckpointOptions(enable_async=True)
    path = Path(checkpoint.write(tmp_path / "ckpt", options))
    assert (path / "commit_success.txt").is_file()  # without `sync`
    assert sizes_bytes == [4000 + 4]  # with the counter
    assert "Training waits until" in caplog.text
    checkpoint.read(path).assert_consumed()


def test_compressed_checkpoint_of_an_earlier_version_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = np.repeat(np.arange(10, dtype="float32"), 10_000)
    variable = sg.Variable(wanted)
    checkpoint = sg.train.Checkpoint(v=variable)
    monkeypatch.setattr(
        "stratagem.checkpoint.storage.files._saving", lambda orbax: contextlib.nullcontext(orbax)
    )
    path = Path(checkpoint.save(tmp_path / "ckpt"))
    size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    assert size_bytes < wanted.nbytes / 2
    variable.assign(np.zeros_like(wanted))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(variable.value, wanted)


def test_prepared_save_writes_the_values(tmp_path: Path) -> None:
    variable = sg.Variable(np.arange(1000.0, dtype="float32"))
    checkpoint = sg.train.Checkpoint(v=variable)
    checkpoint.prepare()
    path = checkpoint.save(tmp_path / "ckpt", sg.train.CheckpointOptions(enable_async=True))
    checkpoint.sync()
    variable.assign(np.zeros(1000))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(variable.value, np.arange(1000.0))


# Copies on devices: buffers of their own, in pieces, as far as the memory reaches.


def sharded(value: np.ndarray[Any, Any], *axes: str | None) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))


ROWS = np.arange(48, dtype="float32").reshape(8, 6)
ARRAYS = {
    "one device": lambda: jax.device_put(ROWS, jax.devices()[1]),
    "uncommitted": lambda: jnp.asarray(ROWS),
    "replicated": lambda: sharded(ROWS),
    "rows": lambda: sharded(ROWS, "x"),
    "rows and columns": lambda: sharded(ROWS, "y", "x"),
    "half": lambda: jnp.asarray(ROWS, "bfloat16"),
    "one row": lambda: jnp.asarray(ROWS.reshape(1, 48)),
    "flags": lambda: jnp.asarray(ROWS > 9),
    "scalar": lambda: jnp.asarray(7),
}


@pytest.mark.parametrize("piece_bytes", [2**27, 50])
def test_copies_are_right_after_the_originals_are_donated(monkeypatch, piece_bytes: int) -> None:
    monkeypatch.setattr(device_copies, "_PIECE_BYTES", piece_bytes)
    stand_in(monkeypatch)
    arrays = {name: make() for name, make in ARRAYS.items()}
    wanted = {name: np.array(array) for name, array in arrays.items()}
    copied = copy_on_devices({"item": arrays})["item"]
    for array in arrays.values():
        jax.block_until_ready(jax.jit(jnp.zeros_like, donate_argnums=0)(array))
    assert list(copied) == list(arrays)
    for name, one in copied.items():
        assert isinstance(one, PendingArray)
        num_parts = {"rows": 2, "rows and columns": 4}.get(name, 1)
        is_cut = piece_bytes == 50 and wanted[name].nbytes > num_parts * piece_bytes
        assert len(one.pieces) > num_parts if is_cut else len(one.pieces) == num_parts
        np.testing.assert_array_equal(one.on_host(), wanted[name], strict=True)
        assert all(piece.is_deleted() for _, piece in one.pieces)  # type: ignore[attr-defined]


def test_replicated_values_are_copied_on_all_devices_in_turn(monkeypatch) -> None:
    stand_in(monkeypatch)
    arrays = {str(index): sharded(ROWS) for index in range(8)}
    copied = copy_on_devices({"item": arrays})["item"]
    devices = [piece.device for one in copied.values() for _, piece in one.pieces]
    assert sorted(devices.count(device) for device in jax.devices()[:4]) == [2, 2, 2, 2]


def test_mesh_and_modes_of_the_caller_do_not_apply(monkeypatch) -> None:
    stand_in(monkeypatch)
    rows = sharded(ROWS, "x")
    with jax.enable_x64(True):
        double = jnp.asarray(ROWS, "float64") / 3
        wanted = np.array(double)
    modes = (jax.disable_jit(True), jax.set_mesh(rows.sharding.mesh))
    with modes[0], modes[1]:
        copied = copy_on_devices({"item": {"rows": rows, "double": double}})["item"]
    np.testing.assert_array_equal(copied["rows"].on_host(), ROWS, strict=True)
    np.testing.assert_array_equal(copied["double"].on_host(), wanted, strict=True)


def test_values_on_the_host_are_returned_as_they_are(monkeypatch) -> None:
    stand_in(monkeypatch)
    empty, pinned = jnp.zeros((0, 3)), sharded(ROWS)
    on_host = {"numpy": ROWS, "empty": empty}
    copied = copy_on_devices({"item": on_host})["item"]
    assert all(copied[name] is value for name, value in on_host.items())
    monkeypatch.setattr(device_copies, "is_accelerator", lambda device: False)
    assert not are_on_accelerator(pinned)
    assert keep_on_device(pinned) is pinned


def test_pinned_host_memory_is_not_copied_on_the_device(monkeypatch) -> None:
    stand_in(monkeypatch)
    device = jax.devices()[0]
    kinds = {one.kind for one in device.addressable_memories()} - {device.default_memory().kind}
    for kind in kinds:
        sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=kind)
        assert not are_on_accelerator(jax.device_put(ROWS, sharding))
    assert kinds
    assert are_on_accelerator(jax.device_put(ROWS, device))


def test_what_fits_is_copied_and_the_rest_is_left(monkeypatch, caplog) -> None:
    stand_in(monkeypatch, limit_bytes=320)  # 300 without the reserve
    arrays = {
        name: jax.device_put(np.full(length, 3.0, "float32"), jax.devices()[0])
        for name, length in {"a": 40, "b": 60, "c": 20}.items()
    }
    with caplog.at_level(logging.INFO, "stratagem"):
        copied = copy_on_devices({"item": arrays})["item"]
    assert [isinstance(one, PendingArray) for one in copied.values()] == [True, False, True]
    assert copied["b"] is arrays["b"]
    assert "Training waits for the transfer of 2.4e-07 GB" in caplog.text


def test_lack_of_memory_while_copying_leaves_the_values(monkeypatch) -> None:
    stand_in(monkeypatch)

    def fail(arrays: list[jax.Array]) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(device_copies, "_program", lambda *described: fail)
    value = jax.device_put(ROWS, jax.devices()[0])
    assert copy_on_devices({"item": {"a": value}})["item"]["a"] is value


def test_other_errors_while_copying_are_raised(monkeypatch) -> None:
    stand_in(monkeypatch)

    def fail(arrays: list[jax.Array]) -> Any:
        raise jax.errors.JaxRuntimeError("INTERNAL: the device is lost")

    monkeypatch.setattr(device_copies, "_program", lambda *described: fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="the device is lost"):
        copy_on_devices({"item": {"a": jax.device_put(ROWS, jax.devices()[0])}})


def test_gathered_value_stays_on_its_device_if_there_is_room(monkeypatch) -> None:
    value = jax.device_put(ROWS, jax.devices()[0])
    stand_in(monkeypatch, limit_bytes=100)
    assert keep_on_device(value) is value
    stand_in(monkeypatch)
    kept = keep_on_device(value)
    np.testing.assert_array_equal(kept.on_host(), ROWS)
    assert value.is_deleted()


# Memory of a device that copies may take, from its statistics.

DEVICE: Any = "a device"


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    counts: dict[str, int] = {}
    monkeypatch.setattr(device_room, "read_stats", lambda device: counts)
    return counts


def test_memory_of_the_largest_step_and_a_reserve_stay_free(stats: dict[str, int]) -> None:
    stats.update(bytes_limit=1600, bytes_in_use=200, peak_bytes_in_use=500)
    assert DeviceRoom().left_bytes(DEVICE, 0) == 1600 - 500 - 100
    stats["bytes_in_use"] = 700
    assert DeviceRoom().left_bytes(DEVICE, 0) == 1600 - 700 - 100
    stats["bytes_in_use"] = 1600
    assert DeviceRoom().left_bytes(DEVICE, 0) == 0


def test_own_copies_in_the_peak_do_not_count(stats: dict[str, int]) -> None:
    room = DeviceRoom()
    stats.update(bytes_limit=1600, bytes_in_use=200, peak_bytes_in_use=500)
    room.take(DEVICE, 300)
    stats["peak_bytes_in_use"] = 800  # steps beside the copies
    assert room.left_bytes(DEVICE, 0) == 1600 - 500 - 100
    room.take(DEVICE, 300)
    stats["peak_bytes_in_use"] = 1200  # steps that need more
    assert room.left_bytes(DEVICE, 0) == 1600 - 900 - 100


@pytest.mark.parametrize("known", [{}, {"bytes_in_use": 1}, {"bytes_limit": 1}])
def test_unknown_memory_is_none(stats: dict[str, int], known: dict[str, int]) -> None:
    stats.update(known)
    assert DeviceRoom().left_bytes(DEVICE, 0) == 0


def test_piece_must_fit_into_a_free_block_or_into_new_memory(stats: dict[str, int]) -> None:
    stats.update(bytes_limit=1600, bytes_in_use=200, pool_bytes=1600, largest_free_block_bytes=50)
    assert DeviceRoom().left_bytes(DEVICE, 50) > 0
    assert DeviceRoom().left_bytes(DEVICE, 51) == 0
    stats["pool_bytes"] = 1500
    assert DeviceRoom().left_bytes(DEVICE, 51) > 0
    stats.update(pool_bytes=1600, largest_free_block_bytes=0)  # which means unknown
    assert DeviceRoom().left_bytes(DEVICE, 51) > 0


def test_cpu_devices_do_not_count_their_memory() -> None:
    assert read_stats(jax.devices("cpu")[0]) == {}
