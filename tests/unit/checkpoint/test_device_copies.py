"""Copies on devices: buffers of their own, in pieces, as far as the memory reaches."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from stratagem.checkpoint import device_copies
from stratagem.checkpoint.device_copies import are_on_accelerator, copy_on_devices, keep_on_device
from stratagem.checkpoint.storage.staging import PendingArray
from tests.unit.checkpoint.accelerators import stand_in


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
    for name, pending in copied.items():
        assert isinstance(pending, PendingArray)
        num_parts = {"rows": 2, "rows and columns": 4}.get(name, 1)
        is_cut = piece_bytes == 50 and wanted[name].nbytes > num_parts * piece_bytes
        assert len(pending.pieces) > num_parts if is_cut else len(pending.pieces) == num_parts
        np.testing.assert_array_equal(pending.on_host(), wanted[name], strict=True)
        assert all(piece.is_deleted() for _, piece in pending.pieces)  # type: ignore[attr-defined]


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
