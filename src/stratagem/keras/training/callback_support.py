"""Support of Keras's callbacks under a strategy, and our replacements.

`docs/keras.md` has the table.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import keras

from stratagem.messages import explain

__all__ = ["CHIEF_ONLY", "check_callbacks", "listed"]

# What writes or shows the logs, which are the same on all processes, and needs nothing else.
CHIEF_ONLY = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ProgbarLogger,
    keras.callbacks.RemoteMonitor,
)

# Every process would write the same files; or one alone would read variables that take all.
_OF_ONE_PROCESS = {
    "BackupAndRestore": "sg.BackupAndRestore, which goes on at the next batch, too",
    "OrbaxCheckpoint": "sg.BackupAndRestore, or sg.train.CheckpointManager in a callback",
    "TensorBoard": "sg.TensorBoard, which needs no TensorFlow",
}


def listed(callbacks: Any) -> list[Any]:
    """Returns the callbacks of an argument of `fit` as a list."""
    if callbacks is None:
        return []
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


def check_callbacks(name: str, callbacks: Sequence[Any], *, spans_processes: bool) -> None:
    """Refuses callbacks that would fail in the middle, before anything is written.

    Args:
        name: of the method.
        callbacks: which it received.
        spans_processes: whether several processes call it.

    Raises:
        NotImplementedError: one that cannot work with several processes.
        ImportError: one that needs TensorFlow, which is not installed.
    """
    for callback in callbacks:
        kind = _keras_name(callback)
        if kind is None:
            continue
        if spans_processes:
            raise NotImplementedError(
                explain(
                    f"{name} received keras.callbacks.{kind} under a strategy of several "
                    "processes, each of which would write its files.",
                    expected="a callback whose files one process writes for all.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                )
            )
        if kind == "TensorBoard" and importlib.util.find_spec("tensorflow") is None:
            raise ImportError(
                explain(
                    f"{name} received keras.callbacks.TensorBoard, which needs TensorFlow, and "
                    "TensorFlow is not installed.",
                    expected="a callback that works without it.",
                    fix=f"use {_OF_ONE_PROCESS[kind]}.",
                )
            )


def _keras_name(callback: Any) -> str | None:
    """The name of the class of Keras's that a callback is of; None for any other class."""
    for name in _OF_ONE_PROCESS:
        class_ = getattr(keras.callbacks, name, None)  # OrbaxCheckpoint came with Keras 3.13
        if class_ is not None and isinstance(callback, class_):
            return name
    return None
