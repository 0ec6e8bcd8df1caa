"""`SidecarEvaluator`: evaluates the checkpoints of a training job as they appear."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np

from stratagem import config
from stratagem.keras.evaluation.checkpoint_files import CheckpointFile, KerasFiles
from stratagem.keras.evaluation.checkpoint_loop import CheckpointLoop, LoopLimits
from stratagem.keras.evaluation.sidecar_arguments import check_arguments
from stratagem.keras.evaluation.stop_notice import StopNotice
from stratagem.keras.training.model import strategy_of


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
            timeout_s=config.checkpoint_timeout_s() if timeout_s is None else timeout_s,
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
