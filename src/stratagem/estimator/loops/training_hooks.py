"""The hooks of a training, in the order in which they are called."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.estimator.hooks import (
    CheckpointSaverHook,
    CheckpointSaverListener,
    LoggingTensorHook,
    SessionRunHook,
    StepCounterHook,
)
from stratagem.estimator.hooks.checkpoint_saver import check_listeners
from stratagem.estimator.loops.training_part import TrainingPart
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.messages import explain

__all__ = ["training_hooks"]


def training_hooks(
    spec: EstimatorSpec,
    hooks: Sequence[SessionRunHook],
    config: RunConfig,
    saving_listeners: Sequence[CheckpointSaverListener] | None,
    model_dir: str,
    part: TrainingPart,
) -> list[SessionRunHook]:
    """Returns all hooks of a training on this process: what saves first, and last what others made.

    Args:
        spec: of the model function, with hooks of its own.
        hooks: what `train` was given.
        config: says when to save and to log.
        saving_listeners: told of each checkpoint.
        model_dir: the folder of the checkpoints.
        part: of this process, of the training.

    Raises:
        TypeError: a listener of another type.
        ValueError: listeners, and nothing that saves.

    Source: tensorflow/estimator estimator.py, _train_with_estimator_spec.
    """
    listeners = check_listeners("saving_listeners", saving_listeners)
    is_chief = part.is_chief
    own = [*hooks, *(spec.training_hooks or ())]
    of_chief = list(spec.training_chief_hooks or ()) if is_chief else []
    every_steps = config.log_step_count_steps
    if every_steps is not None and is_chief:
        values = {"loss": "loss", "step": "global_step"}
        own.append(LoggingTensorHook(values, every_n_iter=every_steps))
        own.append(StepCounterHook(every_steps, output_dir=model_dir))
    savers = [hook for hook in (*own, *of_chief) if isinstance(hook, CheckpointSaverHook)]
    if savers and listeners:
        savers[0].add_listeners(listeners)
    if not savers and part.saves:
        savers = _savers(spec, config, listeners, model_dir)
        return [*savers, *of_chief, *own]
    return [*of_chief, *own]


def _savers(
    spec: EstimatorSpec,
    config: RunConfig,
    listeners: Sequence[CheckpointSaverListener],
    model_dir: str,
) -> list[SessionRunHook]:
    """Every process saves: what has a part on each of them is read by all."""
    # 0 steps or seconds mean no checkpoints, as None does.
    secs = config.save_checkpoints_secs or None
    steps = config.save_checkpoints_steps or None
    if secs is not None or steps is not None:
        return [
            CheckpointSaverHook(
                model_dir,
                save_secs=secs,
                save_steps=steps,
                scaffold=spec.scaffold,
                listeners=listeners,
            )
        ]
    if listeners:
        raise ValueError(
            explain(
                "saving_listeners are given, and the config saves no checkpoints.",
                expected="save_checkpoints_steps or save_checkpoints_secs in the RunConfig.",
                fix="set one of the two, or leave saving_listeners out.",
            )
        )
    return []
