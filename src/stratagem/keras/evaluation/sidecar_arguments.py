"""Argument checks of `SidecarEvaluator`, made before it starts to wait."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras

from stratagem.keras.evaluation.checkpoint_loop import LoopLimits
from stratagem.keras.evaluation.sidecar_export import SidecarEvaluatorModelExport
from stratagem.keras.training.model import strategy_of
from stratagem.messages import explain

__all__ = ["check_arguments"]


def check_arguments(
    *,
    model: Any,
    data: Any,
    checkpoint_dir: Any,
    steps: int | None,
    limits: LoopLimits,
    callbacks: Sequence[Any],
) -> None:
    """Raises a TypeError or ValueError unless an evaluator can work with its arguments."""
    _check_model(model)
    _check_data(data, steps)
    _check_count("steps", steps)
    _check_count("max_evaluations", limits.max_checkpoints)
    _check_seconds("timeout_s", limits.timeout_s)
    _check_seconds("poll_s", limits.poll_s)
    _check_folder(checkpoint_dir)
    _check_callbacks(callbacks, Path(checkpoint_dir))


def _check_model(model: Any) -> None:
    if not isinstance(model, keras.Model):
        raise TypeError(
            explain(
                f"model={model!r} is of type {type(model).__name__}.",
                expected="a Keras model.",
                fix="pass the model that is built as in training.",
            )
        )
    if not model.compiled:
        raise ValueError(
            explain(
                f"Model {model.name!r} is not compiled.",
                expected="one that knows its loss and metrics.",
                fix="call model.compile as in training.",
            )
        )
    strategy = strategy_of(model)
    if strategy is not None and strategy.topology.spans_processes:
        raise ValueError(
            explain(
                f"Model {model.name!r} belongs to {strategy}, which other processes take part in.",
                expected="a model that this process evaluates alone.",
                fix='call SidecarEvaluator where the task type is "evaluator", fit elsewhere.',
            )
        )


def _check_data(data: Any, steps: int | None) -> None:
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise ValueError(
            explain(
                f"data is a tuple of {len(data)}.",
                expected="(x, y), or (x, y, sample_weight).",
                fix="pass a list as x where a model has several inputs: ([a, b], y).",
            )
        )
    if isinstance(data, Iterator) and steps is None:
        raise ValueError(
            explain(
                f"data is the {type(data).__name__} {data!r}, and steps is None.",
                expected="data that can be read again for each checkpoint.",
                fix="pass a dataset; or an iterator that never ends, with steps.",
            )
        )


def _check_count(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected="a whole number, or None.",
                fix=f"pass an int, or leave {name} out.",
            )
        )
    if value < 1:
        raise ValueError(
            explain(
                f"{name}={value} leaves nothing to evaluate.",
                expected="at least 1, or None.",
                fix=f"raise {name}, or leave it out.",
            )
        )


def _check_seconds(name: str, value: Any) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected="a number of seconds.",
                fix=f"pass a number, or leave {name} out.",
            )
        )
    if not 0 < value < math.inf:
        raise ValueError(
            explain(
                f"{name}={value} is no time to wait.",
                expected="a number of seconds above 0: every wait has an end.",
                fix=f"pass a number, or leave {name} out.",
            )
        )


def _check_folder(checkpoint_dir: Any) -> None:
    if not isinstance(checkpoint_dir, str | os.PathLike):
        raise TypeError(
            explain(
                f"checkpoint_dir={checkpoint_dir!r} is of type {type(checkpoint_dir).__name__}.",
                expected="the path of a folder.",
                fix="pass the folder that ModelCheckpoint writes to.",
            )
        )
    if "://" in str(checkpoint_dir) or Path(checkpoint_dir).is_file():
        raise ValueError(
            explain(
                f"checkpoint_dir={str(checkpoint_dir)!r} is no folder.",
                expected="a folder of this machine, there already or not.",
                fix="pass the folder and not a file in it; mount remote storage.",
            )
        )


def _check_callbacks(callbacks: Sequence[Any], folder: Path) -> None:
    for callback in callbacks:
        if not isinstance(callback, keras.callbacks.Callback):
            raise TypeError(
                explain(
                    f"callbacks has {callback!r} of type {type(callback).__name__}.",
                    expected="Keras callbacks.",
                    fix="pass a list of them.",
                )
            )
        is_export = isinstance(callback, SidecarEvaluatorModelExport)
        if is_export and callback.export_folder.resolve() == folder.resolve():
            raise ValueError(
                explain(
                    f"SidecarEvaluatorModelExport writes to checkpoint_dir, {str(folder)!r}.",
                    expected="another folder: what it saves would be evaluated again.",
                    fix="export to a folder below it.",
                )
            )
