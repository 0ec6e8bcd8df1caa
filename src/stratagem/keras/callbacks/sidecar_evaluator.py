"""`SidecarEvaluator`: evaluates the checkpoints of a training job as they appear."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import string
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import keras
import numpy as np

from stratagem import settings
from stratagem.errors import check_number, check_type, invalid
from stratagem.keras.callbacks.checkpoint_loop import (
    CheckpointFile,
    CheckpointLoop,
    KerasFiles,
    LoopLimits,
    StopNotice,
)
from stratagem.keras.training.model import strategy_of
from stratagem.resources import checked_folder

# `SidecarEvaluatorModelExport`: saves the best model seen by a sidecar evaluator.


class SidecarEvaluatorModelExport(keras.callbacks.ModelCheckpoint):
    """Saves the model of each checkpoint that `SidecarEvaluator` finds better than all before.

    Args:
        export_filepath: path, as for `ModelCheckpoint`: `{epoch}` is the checkpoint's epoch, and
            metrics may be written with or without `val_`.
        checkpoint_filepath: the path given to training's `ModelCheckpoint`, used to find the epoch
            in a checkpoint's name. None takes the last separate number.
        monitor: the metric to compare, with or without `val_`.
        verbose: 1 prints a line at each comparison.
        save_weights_only: True saves the weights alone.
        mode: "min" or "max", the better direction; "auto" derives it from the metric.
        initial_value_threshold: the value that the first model must beat.
        save_freq: "eval", after each evaluation; no other value is supported.

    Raises:
        ValueError: another `save_freq`, or an `export_filepath` that Keras cannot save to.

    Example:
        >>> best = sg.SidecarEvaluatorModelExport("best/{epoch:04d}.keras", monitor="accuracy")
        >>> best.monitor, best.save_best_only
        ('val_accuracy', True)

    Source: tf_keras 2.16 sidecar_evaluator.py, SidecarEvaluatorModelExport.
    """

    def __init__(
        self,
        export_filepath: str | os.PathLike[str],
        checkpoint_filepath: str | os.PathLike[str] | None = None,
        *,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        initial_value_threshold: float | None = None,
        save_freq: str = "eval",
    ) -> None:
        if save_freq != "eval":
            raise invalid(
                f"save_freq={save_freq!r} is not supported in an evaluator.",
                expected='"eval".',
                fix="omit save_freq.",
            )
        super().__init__(
            os.fspath(export_filepath),
            monitor=f"val_{monitor.removeprefix('val_')}",
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            initial_value_threshold=initial_value_threshold,
        )
        self.export_folder = Path(export_filepath).parent
        self._export_fields = _fields(os.fspath(export_filepath))
        self._checkpoint_name = (
            None if checkpoint_filepath is None else _name_pattern(Path(checkpoint_filepath).name)
        )
        self._checkpoint: CheckpointFile | None = None

    def set_checkpoint(self, checkpoint: CheckpointFile) -> None:
        """Sets the checkpoint of the next evaluation; called by `SidecarEvaluator`."""
        self._checkpoint = checkpoint

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> NoReturn:
        """Raises a ValueError: use `ModelCheckpoint` in training."""
        raise invalid(
            "SidecarEvaluatorModelExport was given to fit.",
            expected="this callback in SidecarEvaluator(callbacks=[...]).",
            fix="pass keras.callbacks.ModelCheckpoint(..., save_best_only=True) to fit.",
        )

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the model if it is better.

        Raises:
            ValueError: `logs` lack the monitored metric, or the file name needs an unknown epoch.
        """
        logs = logs or {}
        if self.monitor.removeprefix("val_") not in logs:
            raise invalid(
                f"monitor={self.monitor!r} is not among the metrics: {sorted(logs)}.",
                expected="one of these, with or without val_.",
                fix="correct monitor, or add the metric to compile.",
            )
        both = {**logs, **{f"val_{name}": value for name, value in logs.items()}}
        # Keras counts epochs from 0 in this method, from 1 in file names.
        self.on_epoch_end(self._epoch() - 1, both)

    def _epoch(self) -> int:
        checkpoint = self._checkpoint
        if checkpoint is not None:
            match = self._checkpoint_name and self._checkpoint_name.fullmatch(checkpoint.name)
            epoch = int(match["epoch"]) if match else checkpoint.epoch
            if epoch is not None:
                return epoch
        if "epoch" in self._export_fields:
            name = "a checkpoint" if checkpoint is None else checkpoint.name
            raise invalid(
                f"{self.filepath!r} needs an epoch, but the name of {name} contains none.",
                expected="checkpoints such as ckpt-{epoch:04d}.weights.h5.",
                fix="remove {epoch} from export_filepath, or pass checkpoint_filepath.",
            )
        return 0


def _fields(template: str) -> set[str]:
    return {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}


def _name_pattern(template: str) -> re.Pattern[str] | None:
    """Returns the pattern of names created from a template; None if they have no epoch."""
    pattern, has_epoch = "", False
    for text, name, _, _ in string.Formatter().parse(template):
        pattern += re.escape(text)
        if name == "epoch" and not has_epoch:
            pattern, has_epoch = f"{pattern}(?P<epoch>\\d+)", True
        elif name is not None:
            pattern += ".+?"
    return re.compile(pattern) if has_epoch else None


# Argument checks of `SidecarEvaluator`, made before it waits for checkpoints.


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
    counts: dict[str, Any] = {"steps": steps, "max_evaluations": limits.max_checkpoints}
    for name, count in counts.items():
        check_type(name, count, int | None, "an integer, or None")
    check_number("SidecarEvaluator", or_none=True, **counts)
    seconds: dict[str, Any] = {"timeout_s": limits.timeout_s, "poll_s": limits.poll_s}
    for name, number in seconds.items():
        check_type(name, number, _is_number, "a number of seconds")
    check_number("SidecarEvaluator", above=0, **seconds)
    _check_folder(checkpoint_dir)
    _check_callbacks(callbacks, Path(checkpoint_dir))


def _check_model(model: Any) -> None:
    check_type("model", model, keras.Model, "a Keras model", "pass a model built as in training.")
    if not model.compiled:
        raise invalid(
            f"Model {model.name!r} is not compiled.",
            expected="a compiled model, with a loss and metrics.",
            fix="call model.compile as in training.",
        )
    strategy = strategy_of(model)
    if strategy is not None and strategy.topology.spans_processes:
        raise invalid(
            f"Model {model.name!r} belongs to {strategy}, which spans several processes.",
            expected="a model that this process evaluates alone.",
            fix='use SidecarEvaluator in the task of type "evaluator", and fit in the others.',
        )


def _check_data(data: object, steps: int | None) -> None:
    if isinstance(data, tuple) and not 1 <= len(data) <= 3:
        raise invalid(
            f"data is a tuple of length {len(data)}.",
            expected="(x, y) or (x, y, sample_weight).",
            fix="pass several inputs as a list: ([a, b], y).",
        )
    if isinstance(data, Iterator) and steps is None:
        raise invalid(
            f"data is the {type(data).__name__} {data!r}, and steps is None.",
            expected="data that can be read again for each checkpoint.",
            fix="pass a dataset, or an infinite iterator with steps.",
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_folder(checkpoint_dir: Any) -> None:
    fix = "pass the folder that ModelCheckpoint writes to."
    check_type("checkpoint_dir", checkpoint_dir, str | os.PathLike, "the path of a folder", fix)
    checked_folder("checkpoint_dir", checkpoint_dir)
    if "://" in str(checkpoint_dir) or Path(checkpoint_dir).is_file():
        raise invalid(
            f"checkpoint_dir={str(checkpoint_dir)!r} is not a local folder.",
            expected="a folder on this machine, which need not exist yet.",
            fix="pass the folder instead of a file in it; mount remote storage.",
        )


def _check_callbacks(callbacks: Sequence[Any], folder: Path) -> None:
    for callback in callbacks:
        check_type("an item of callbacks", callback, keras.callbacks.Callback, "a Keras callback")
        is_export = isinstance(callback, SidecarEvaluatorModelExport)
        if is_export and callback.export_folder.resolve() == folder.resolve():
            raise invalid(
                f"SidecarEvaluatorModelExport writes to checkpoint_dir, {str(folder)!r}.",
                expected="another folder, or exported models would be evaluated again.",
                fix="export to a subfolder.",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SidecarEvaluation:
    """Results of evaluating one checkpoint.

    Args:
        checkpoint: file of the checkpoint.
        epoch: the epoch in the file's name; None if there is none.
        step: number of optimizer updates; None if the file has none for an optimizer like the
            model's.
        logs: loss and metrics by name.
    """

    checkpoint: Path
    epoch: int | None
    step: int | None
    logs: Mapping[str, Any]


class SidecarEvaluator:
    """Evaluates each new checkpoint of a training job that runs elsewhere.

    Args:
        model: a compiled model like the one in training, under any strategy or none.
        data: the `x` of `model.evaluate`; a tuple is `(x, y)` or `(x, y, sample_weight)`.
        checkpoint_dir: folder where `ModelCheckpoint` writes `.weights.h5` or `.keras` files; it
            need not exist yet.
        steps: batches per evaluation; None for all.
        max_evaluations: number of checkpoints, evaluated or skipped for a newer one, after which to
            stop: the number of epochs, if each writes one. None runs until SIGTERM.
        callbacks: Keras callbacks; their `on_test_...` methods are called.
        every_checkpoint: True evaluates all in order; False skips to the newest.
        timeout_s: seconds to wait for the next checkpoint; None for
            `STRATAGEM_CHECKPOINT_TIMEOUT_S`.
        poll_s: seconds between scans of the folder. A file unchanged between two scans counts as
            complete.

    Raises:
        TypeError: an argument of another type.
        ValueError: a model that is not compiled, a value out of range, an iterator without `steps`,
            or a path that cannot be a folder.

    Example:
        >>> import tempfile
        >>> model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        >>> model.compile(loss="mse")
        >>> data = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.save_weights(f"{folder}/ckpt-0001.weights.h5")  # as training does
        ...     evaluator = sg.SidecarEvaluator(model, data, folder, None, 1, poll_s=0.01)
        ...     (evaluation,) = evaluator.start()
        ckpt-0001.weights.h5: loss ...
        >>> evaluation.epoch, sorted(evaluation.logs)
        (1, ['loss'])

    Source: tf_keras 2.16 sidecar_evaluator.py, SidecarEvaluator.
    """

    def __init__(
        self,
        model: keras.Model,
        data: object,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: list[keras.callbacks.Callback]
        | tuple[keras.callbacks.Callback, ...]
        | keras.callbacks.Callback
        | None = None,
        *,
        every_checkpoint: bool = False,
        timeout_s: float | None = None,
        poll_s: float = 1.0,
    ) -> None:
        self.model: Any = model
        self.data = data
        self.checkpoint_dir = checkpoint_dir
        self.steps = steps
        self.max_evaluations = max_evaluations
        if callbacks is None:
            callbacks = []
        several = isinstance(callbacks, list | tuple)
        self.callbacks: list[Any] = list(callbacks) if several else [callbacks]
        self._limits = LoopLimits(
            every=every_checkpoint,
            max_checkpoints=max_evaluations,
            timeout_s=settings.read("checkpoint_timeout_s") if timeout_s is None else timeout_s,
            poll_s=poll_s,
        )
        self._format = KerasFiles()
        check_arguments(
            model=model,
            data=data,
            checkpoint_dir=checkpoint_dir,
            steps=steps,
            limits=self._limits,
            callbacks=self.callbacks,
        )
        names = ("x", "y", "sample_weight")
        values = data if isinstance(data, tuple) else (data,)
        self._data = dict(zip(names, values, strict=False))
        self._evaluations: list[SidecarEvaluation] = []
        self._was_stopped = False

    @property
    def evaluations(self) -> tuple[SidecarEvaluation, ...]:
        """Results of the last `start`, even if it ended with an error."""
        return tuple(self._evaluations)

    @property
    def was_stopped(self) -> bool:
        """True if SIGTERM ended the last `start`."""
        return self._was_stopped

    def start(self) -> list[SidecarEvaluation]:
        """Evaluates checkpoints as they appear, and prints a line for each.

        Launchers send SIGTERM when training is over. The evaluator then finishes the current
        evaluation, evaluates the newest checkpoint if it has not yet, and returns. A second SIGTERM
        ends the process.

        Returns:
            The evaluations, in order.

        Raises:
            DeadlineExceededError: no checkpoint appeared in time.
            ValueError: a checkpoint does not fit the model.
            RuntimeError: the newest checkpoint is incomplete and no longer being written.
        """
        self._evaluations = []
        callbacks = keras.callbacks.CallbackList(self.callbacks, model=self.model)
        loop = CheckpointLoop(
            Path(self.checkpoint_dir),
            self._format,
            load=self._load,
            evaluate=lambda checkpoint: self._evaluate(checkpoint, callbacks),
            limits=self._limits,
        )
        with StopNotice() as notice:
            try:
                self._prepare()
                loop.run(notice)
            finally:
                self._was_stopped = notice.is_given
        return list(self._evaluations)

    def _prepare(self) -> None:
        """Creates all variables that a checkpoint has values for."""
        if not self.model.built:
            self.model.evaluate(**self._data, steps=1, verbose=0)
        optimizer = self.model.optimizer
        if optimizer is not None and not optimizer.built:
            strategy = strategy_of(self.model)
            with contextlib.nullcontext() if strategy is None else strategy.scope():
                optimizer.build(self.model.trainable_variables)

    def _load(self, checkpoint: CheckpointFile) -> None:
        optimizer = self.model.optimizer
        if optimizer is not None:
            optimizer.iterations.assign(0)  # stays 0 if the file has none for this optimizer
        self._format.load(checkpoint, self.model)

    def _evaluate(
        self, checkpoint: CheckpointFile, callbacks: keras.callbacks.CallbackList
    ) -> None:
        for callback in self.callbacks:
            if hasattr(callback, "set_checkpoint"):
                callback.set_checkpoint(checkpoint)
        started_at_s = time.monotonic()
        logs = self.model.evaluate(
            **self._data, steps=self.steps, verbose=0, callbacks=callbacks, return_dict=True
        )
        optimizer = self.model.optimizer
        step = 0 if optimizer is None else int(np.asarray(optimizer.iterations.value))
        evaluation = SidecarEvaluation(
            checkpoint=checkpoint.path, epoch=checkpoint.epoch, step=step or None, logs=dict(logs)
        )
        self._evaluations.append(evaluation)
        print(_line(evaluation, time.monotonic() - started_at_s), flush=True)


def _line(evaluation: SidecarEvaluation, took_s: float) -> str:
    logs = sorted(evaluation.logs.items(), key=lambda item: item[0] != "loss")
    metrics = ", ".join(f"{name} {_number(value)}" for name, value in logs)
    return f"{evaluation.checkpoint.name}: {metrics} ({took_s:.1f} s)"


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
