"""Argument checks of `SidecarEvaluator`, made before it waits for checkpoints."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from stratagem.folders import checked_folder
from stratagem.keras.evaluation.checkpoint_loop import LoopLimits
from stratagem.keras.evaluation.sidecar_export import SidecarEvaluatorModelExport
from stratagem.keras.training.model import strategy_of
from stratagem.messages import explain


def check_arguments(
    *,
    model: object,
    data: object,
    checkpoint_dir: str | os.PathLike[str],
    steps: int | None,
    limits: LoopLimits,
    callbacks: Sequence[Any],
) -> None:
    """Raises a TypeError or ValueError for invalid arguments of an evaluator."""
    _check_model(model)
    _check_data(data, steps)
    _check_count("steps", steps)
    _check_count("max_evaluations", limits.max_checkpoints)
    _check_seconds("timeout_s", limits.timeout_s)
    _check_seconds("poll_s", limits.poll_s)
    _check_folder(checkpoint_dir)
    _check_callbacks(callbacks, Path(checkpoint_dir))


def _check_model(model: object) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            explain(
                f"model={model!r} is of type {type(model).__name__}.",
                expected="a Keras model.",
                fix="pass a model built as in training.",
            )
        )
    if not model.compiled:
        raise ValueError(
            explain(
                f"Model {model.name!r} is not compiled.",
                expected="a compiled model, with a loss and metrics.",
                fix="call model.compile as in training.",
            )
        )
    strategy = strategy_of(model)
    if strategy is not None and strategy.topology.spans_processes:
        raise ValueError(
            explain(
                f"Model {model.name!r} belongs to {strategy}, which spans several processes.",
                expected="a model that this process evaluates alone.",
                fix='use SidecarEvaluator in the task of type "evaluator", and fit in the others.',
            )
        )


def _check_data(data: object, steps: int | None) -> None:
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise ValueError(
            explain(
                f"data is a tuple of length {len(data)}.",
                expected="(x, y) or (x, y, sample_weight).",
                fix="pass several inputs as a list: ([a, b], y).",
            )
        )
    if isinstance(data, Iterator) and steps is None:
        raise ValueError(
            explain(
                f"data is the {type(data).__name__} {data!r}, and steps is None.",
                expected="data that can be read again for each checkpoint.",
                fix="pass a dataset, or an infinite iterator with steps.",
            )
        )


def _check_count(name: str, value: object) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected="an integer, or None.",
                fix=f"pass an int, or omit {name}.",
            )
        )
    if value < 1:
        raise ValueError(
            explain(
                f"{name}={value} leaves nothing to evaluate.",
                expected="at least 1, or None.",
                fix=f"raise {name}, or omit it.",
            )
        )


def _check_seconds(name: str, value: object) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected="a number of seconds.",
                fix=f"pass a number, or omit {name}.",
            )
        )
    if not 0 < value < math.inf:
        raise ValueError(
            explain(
                f"{name}={value} is out of range.",
                expected="a finite number of seconds above 0.",
                fix=f"pass such a number, or omit {name}.",
            )
        )


def _check_folder(checkpoint_dir: object) -> None:
    if not isinstance(checkpoint_dir, str | os.PathLike):
        raise TypeError(
            explain(
                f"checkpoint_dir={checkpoint_dir!r} is of type {type(checkpoint_dir).__name__}.",
                expected="the path of a folder.",
                fix="pass the folder that ModelCheckpoint writes to.",
            )
        )
    checked_folder("checkpoint_dir", checkpoint_dir)
    if "://" in str(checkpoint_dir) or Path(checkpoint_dir).is_file():
        raise ValueError(
            explain(
                f"checkpoint_dir={str(checkpoint_dir)!r} is not a local folder.",
                expected="a folder on this machine, which need not exist yet.",
                fix="pass the folder instead of a file in it; mount remote storage.",
            )
        )


def _check_callbacks(callbacks: Sequence[Any], folder: Path) -> None:
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                explain(
                    f"callbacks contains {callback!r} of type {type(callback).__name__}.",
                    expected="Keras callbacks.",
                    fix="pass a list of keras.callbacks.Callback objects.",
                )
            )
        is_export = isinstance(callback, SidecarEvaluatorModelExport)
        if is_export and callback.export_folder.resolve() == folder.resolve():
            raise ValueError(
                explain(
                    f"SidecarEvaluatorModelExport writes to checkpoint_dir, {str(folder)!r}.",
                    expected="another folder, or exported models would be evaluated again.",
                    fix="export to a subfolder.",
                )
            )
