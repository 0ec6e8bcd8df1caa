"""Callbacks of Keras's that a strategy refuses, and those that it lets through."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from stratagem.keras.training.several_processes import check_callbacks
from tests.parity.comparison import mirrored, regression


def _bare(name: str) -> Any:
    class_ = getattr(keras.callbacks, name, None)
    if class_ is None:
        pytest.skip(f"this Keras has no {name}")
    return object.__new__(class_)


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("BackupAndRestore", r"use sg\.BackupAndRestore"),
        ("OrbaxCheckpoint", r"use sg\.BackupAndRestore"),
        ("TensorBoard", r"use sg\.TensorBoard"),
    ],
)
def test_several_processes_refuse_what_each_would_write(name: str, instead: str) -> None:
    with pytest.raises(NotImplementedError, match=instead):
        check_callbacks("fit", [keras.callbacks.History(), _bare(name)], spans_processes=True)


def test_all_others_pass_in_several_processes(tmp_path: Path) -> None:
    refused = {"BackupAndRestore", "OrbaxCheckpoint", "TensorBoard", "CallbackList"}
    names = {name for name in dir(keras.callbacks) if name[0].isupper()} - refused
    check_callbacks("fit", [_bare(name) for name in sorted(names)], spans_processes=True)


def test_tensorboard_of_keras_needs_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = regression(8)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"use sg\.TensorBoard, which works without TensorFlow"):
        model.fit(x, y, verbose=0, callbacks=_bare("TensorBoard"))
    assert int(model.optimizer.iterations) == 0


@pytest.mark.parametrize("name", ["BackupAndRestore", "CSVLogger", "ModelCheckpoint"])
def test_writers_of_keras_write_in_one_process(name: str, tmp_path: Path) -> None:
    makers = {
        "BackupAndRestore": lambda: keras.callbacks.BackupAndRestore(
            tmp_path / "written", delete_checkpoint=False
        ),
        "CSVLogger": lambda: keras.callbacks.CSVLogger(tmp_path / "written"),
        "ModelCheckpoint": lambda: keras.callbacks.ModelCheckpoint(tmp_path / "written.keras"),
    }
    x, y = regression(8)
    with mirrored(2).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[makers[name]()])
    assert list(tmp_path.glob("written*"))
    if name == "BackupAndRestore":
        before = np.array(model.layers[0].kernel.value)
        model.layers[0].kernel.assign(before * 0)
        model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[makers[name]()])
        np.testing.assert_array_equal(model.layers[0].kernel.value, before)  # nothing was left
