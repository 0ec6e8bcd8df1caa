"""Arrays that are sent from a device after a save returned."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from stratagem.checkpoint.storage import staging as pending
from stratagem.checkpoint.storage.files import read_arrays, read_manifest
from stratagem.checkpoint.storage.staging import PendingArray, Staging, receive


class Piece:
    """A piece on a device that records what is asked of it."""

    def __init__(self, name: str, value: np.ndarray[Any, Any], log: list[str]) -> None:
        self.name, self.value, self.log = name, value, log
        self.nbytes = value.nbytes

    def copy_to_host_async(self) -> None:
        self.log.append(f"start {self.name}")

    def delete(self) -> None:
        self.log.append(f"free {self.name}")

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        self.log.append(f"read {self.name}")
        return self.value


def divided(name: str, value: np.ndarray[Any, Any], num_pieces: int, log: list[str]) -> Any:
    bounds = np.linspace(0, len(value), num_pieces + 1, dtype=int).tolist()
    spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
    rest = (slice(None),) * (value.ndim - 1)
    pieces = [
        ((span, *rest), Piece(f"{name}{index}", value[span], log))
        for index, span in enumerate(spans)
    ]
    return PendingArray(value.shape, value.dtype, tuple(pieces))


@pytest.mark.parametrize(
    "dtype", ["float32", ml_dtypes.bfloat16, "bool", "complex128", "int64", ml_dtypes.float8_e4m3fn]
)
def test_pieces_of_every_dtype_are_put_together(dtype: Any) -> None:
    value = np.arange(35).reshape(7, 5).astype(dtype)
    array = divided("x", value, 3, [])
    assert array.nbytes == value.nbytes
    np.testing.assert_array_equal(array.on_host(), value, strict=True)
    scalar = np.array(3).astype(dtype)
    array = PendingArray((), scalar.dtype, (((), Piece("s", scalar, [])),))
    np.testing.assert_array_equal(array.on_host(), scalar, strict=True)


def test_few_transfers_are_begun_ahead_and_pieces_are_freed_in_turn(monkeypatch) -> None:
    monkeypatch.setattr(pending, "_AHEAD_BYTES", 16)
    log: list[str] = []
    array = divided("x", np.arange(4.0), 4, log)
    receive([(np.empty(4), array)])
    expected = "start 0,start 1,read 0,free 0,start 2,read 1,free 1,start 3,read 2,free 2,read 3"
    assert [line.replace("x", "") for line in log[:11]] == expected.split(",")


def test_piece_larger_than_the_limit_is_sent_alone(monkeypatch) -> None:
    monkeypatch.setattr(pending, "_AHEAD_BYTES", 1)
    log: list[str] = []
    receive([(np.empty(2), divided("x", np.arange(2.0), 2, log))])
    assert log[:5] == ["start x0", "read x0", "free x0", "start x1", "read x1"]


def test_all_pieces_are_freed_if_a_transfer_fails() -> None:
    log: list[str] = []
    good, bad = divided("a", np.arange(2.0), 1, log), divided("b", np.arange(2.0), 1, log)
    with pytest.raises(ValueError, match="could not broadcast"):
        receive([(np.empty(1), bad), (np.empty(2), good)])
    assert {"free a0", "free b0"} <= set(log)


def test_staging_keeps_the_order_and_fills_in_what_is_on_a_device() -> None:
    log: list[str] = []
    values = {"a": np.arange(6.0), "b": np.arange(9, dtype="int32"), "c": np.array(2.5)}
    items: Any = {
        "one": {"a": divided("a", values["a"], 2, log), "b": values["b"]},
        "two": {"c": values["c"], "d": divided("d", values["b"], 1, log)},
    }
    staging = Staging()
    locations = staging.put(items)
    assert log == []
    assert [(one.item, one.path) for one in locations] == [
        ("one", "a"),
        ("one", "b"),
        ("two", "c"),
        ("two", "d"),
    ]
    staging.fill([(locations[0], items["one"]["a"]), (locations[3], items["two"]["d"])])
    found = staging.get(locations)
    np.testing.assert_array_equal(found["one"]["a"], values["a"], strict=True)
    np.testing.assert_array_equal(found["one"]["b"], values["b"], strict=True)
    np.testing.assert_array_equal(found["two"]["c"], values["c"], strict=True)
    np.testing.assert_array_equal(found["two"]["d"], values["b"], strict=True)


def test_staging_without_memory_frees_the_device(monkeypatch) -> None:
    log: list[str] = []
    items: Any = {"one": {"a": divided("a", np.arange(6.0), 2, log)}}
    staging = Staging()
    locations = staging.put(items)

    def fail(descriptor: int, size_bytes: int) -> None:
        raise OSError("no memory")

    monkeypatch.setattr("stratagem.checkpoint.storage.staging._allocate", fail)
    staging._memory = None
    with pytest.raises(OSError, match="no memory"):
        staging.fill([(locations[0], items["one"]["a"])])
    assert log == ["free a0", "free a1"]


@pytest.mark.slow
def test_process_that_ends_finishes_the_transfer_first(tmp_path: Path) -> None:
    program = f"""
import time
import numpy as np
from pathlib import Path
import stratagem as sg
from stratagem.checkpoint import device_copies
from stratagem.checkpoint.storage import staging as pending
device_copies.is_accelerator = lambda device: True
device_copies.read_stats = lambda device: dict(bytes_limit=2**40, bytes_in_use=0)
land = pending._land
pending._land = lambda *arguments: (time.sleep(0.1), land(*arguments))
variables = {{f"v{{i}}": sg.Variable(np.full(5_000_000, i, "float32")) for i in range(4)}}
options = sg.train.CheckpointOptions(enable_async=True)
path = sg.train.Checkpoint(**variables).write({str(tmp_path / "ckpt")!r}, options)
print(Path(path).exists())
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert (done.stdout.strip(), done.stderr) == ("False", "")
    manifest = read_manifest(tmp_path / "ckpt")
    arrays = read_arrays(tmp_path / "ckpt", manifest, ["v3_state"])["v3_state"]
    assert (next(iter(arrays.values())) == 3).all()
