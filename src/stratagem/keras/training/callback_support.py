"""Checks Keras callbacks for support under a strategy. Table: `docs/guides/keras.md`."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import keras

from stratagem.messages import explain

# These write or show only the logs, which are the same on all processes.
CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)

# Each process would write the same files, or one would read variables that need all processes.
_OF_ONE_PROCESS = {
    "BackupAndRestore": "sg.BackupAndRestore, which also resumes at the next batch",
    "OrbaxCheckpoint": "sg.BackupAndRestore, or sg.train.CheckpointManager in a callback",
    "TensorBoard": "sg.TensorBoard, which works without TensorFlow",
}


def listed(callbacks: object) -> list[Any]:
    """Returns the `callbacks` argument of `fit` as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def check_callbacks(name: str, callbacks: Sequence[Any], *, spans_processes: bool) -> None:
    """Raises NotImplementedError or ImportError for callbacks that would fail during training.

    `name` is the method for messages; `spans_processes` is True if several processes call it.
    """
    for callback in callbacks:
        kind = _keras_name(callback)
        if kind is None:
            continue
        if spans_processes:
            raise NotImplementedError(
                explain(
                    f"{name} received keras.callbacks.{kind}, but the strategy spans several "
                    "processes and each would write its own files.",
                    expected="a callback that writes files from one process only.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                    code="SG413",
                )
            )
        if kind == "TensorBoard" and importlib.util.find_spec("tensorflow") is None:
            raise ImportError(
                explain(
                    f"{name} received keras.callbacks.TensorBoard, which needs TensorFlow, but "
                    "TensorFlow is not installed.",
                    expected="a callback that works without TensorFlow.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                    code="SG413",
                )
            )


def _keras_name(callback: keras.callbacks.Callback) -> str | None:
    """Returns the name of an unsupported Keras callback class; None for other classes."""
    for name in _OF_ONE_PROCESS:
        class_ = getattr(keras.callbacks, name, None)  # OrbaxCheckpoint came with Keras 3.13
        if class_ is not None and isinstance(callback, class_):
            return name
    return None
