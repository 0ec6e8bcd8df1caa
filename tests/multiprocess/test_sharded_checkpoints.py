"""Checkpoints of shards, saved by some processes and opened by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.checkpoint.storage.files import read_manifest
from tests.multiprocess.cluster import PROGRAMS, Ended, run_alone, run_cluster

_PROGRAM = str(PROGRAMS / "sharded_checkpoints.py")


def _run(folder: Path, action: str, num_processes: int, num_devices: int) -> list[Ended]:
    command = [_PROGRAM, str(num_devices), str(folder), action]
    return run_cluster(command, 2) if num_processes == 2 else [run_alone(command)]


def _ran(folder: Path, action: str, num_processes: int, num_devices: int) -> None:
    for ended in _run(folder, action, num_processes, num_devices):
        assert ended.code == 0, ended.errors


def _seen(folder: Path, name: str, process_id: int = 0) -> dict[str, Any]:
    return dict(np.load(folder / f"{name}-{process_id}.npz"))


def _assert_opened(folder: Path, num_processes: int, num_devices: int) -> None:
    """The state is the saved one, bit for bit."""
    saved = _seen(folder, "saved")
    _ran(folder, "open", num_processes, num_devices)
    for process_id in range(num_processes):
        opened = _seen(folder, "opened", process_id)
        assert opened.pop("path") == "ckpt-1"
        assert opened.keys() == saved.keys()
        for name, value in saved.items():
            np.testing.assert_array_equal(opened[name], value, err_msg=name)


def _assert_plain_keras_opens(checkpoint: Path, saved: dict[str, Any]) -> None:
    layers = [keras.Input((1000,)), keras.layers.Dense(512, name="first")]
    plain = keras.Sequential([*layers, keras.layers.Dense(8, name="last")], name="model")
    sg.train.Checkpoint(model=plain).restore(checkpoint).expect_partial()
    for variable in plain.variables:
        name = variable.path.replace("/", ":")
        np.testing.assert_array_equal(variable.value, saved[name], err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "num_processes", "num_devices"),
    [("save", 2, 2), ("async", 2, 1), ("save", 1, 4), ("async", 1, 1)],
)
def test_saved_by_two_processes_and_opened_by_any(
    action: str, num_processes: int, num_devices: int, tmp_path: Path
) -> None:
    _ran(tmp_path, action, 2, 2)
    checkpoints = tmp_path / "checkpoints"
    databases = checkpoints.glob("ckpt-1/pytree/shards.process_*")
    assert sorted(path.name for path in databases) == ["shards.process_0", "shards.process_1"]
    assert [path.name for path in checkpoints.iterdir()] == ["ckpt-1"]
    entries = read_manifest(checkpoints / "ckpt-1")["items"]["pytree"]
    shards = [entry["shard_shape"] for entry in entries if "shard_shape" in entry]
    assert shards == [[250, 512]] * 3  # the large kernel, and Adam's slots of it
    _assert_opened(tmp_path, num_processes, num_devices)
    _assert_plain_keras_opens(checkpoints / "ckpt-1", _seen(tmp_path, "saved"))


@pytest.mark.slow
def test_saved_by_one_process_and_opened_by_two(tmp_path: Path) -> None:
    _ran(tmp_path, "save", 1, 4)
    _assert_opened(tmp_path, 2, 2)


@pytest.mark.slow
def test_process_killed_during_a_save_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    first, second = _run(tmp_path, "lose", 2, 1)
    assert (first.code == 0, second.code) == (False, -9), first.errors
    assert "ckpt-2" not in {path.name for path in (tmp_path / "checkpoints").iterdir()}
    _assert_opened(tmp_path, 2, 1)
