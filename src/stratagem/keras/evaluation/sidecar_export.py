"""`SidecarEvaluatorModelExport`: saves the best model seen by a sidecar evaluator."""

from __future__ import annotations

import os
import re
import string
from pathlib import Path
from typing import Any, Literal, NoReturn

import keras

from stratagem.keras.evaluation.checkpoint_files import CheckpointFile
from stratagem.messages import explain


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
            raise ValueError(
                explain(
                    f"save_freq={save_freq!r} is not supported in an evaluator.",
                    expected='"eval".',
                    fix="omit save_freq.",
                )
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
        raise ValueError(
            explain(
                "SidecarEvaluatorModelExport was given to fit.",
                expected="this callback in SidecarEvaluator(callbacks=[...]).",
                fix="pass keras.callbacks.ModelCheckpoint(..., save_best_only=True) to fit.",
            )
        )

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Saves the model if it is better.

        Raises:
            ValueError: `logs` lack the monitored metric, or the file name needs an unknown epoch.
        """
        logs = logs or {}
        if self.monitor.removeprefix("val_") not in logs:
            raise ValueError(
                explain(
                    f"monitor={self.monitor!r} is not among the metrics: {sorted(logs)}.",
                    expected="one of these, with or without val_.",
                    fix="correct monitor, or add the metric to compile.",
                )
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
            raise ValueError(
                explain(
                    f"{self.filepath!r} needs an epoch, but the name of {name} contains none.",
                    expected="checkpoints such as ckpt-{epoch:04d}.weights.h5.",
                    fix="remove {epoch} from export_filepath, or pass checkpoint_filepath.",
                )
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
