"""Hooks of a training run, in calling order."""

from __future__ import annotations

from collections.abc import Sequence

from stratagem.estimator.argument_checks import check_instances
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverHook, CheckpointSaverListener
from stratagem.estimator.hooks.logging_tensor import LoggingTensorHook
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.hooks.step_counter import StepCounterHook
from stratagem.estimator.loops.training_role import TrainingRole
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.spec import EstimatorSpec
from stratagem.messages import explain


def training_hooks(
    spec: EstimatorSpec,
    hooks: Sequence[SessionRunHook],
    config: RunConfig,
    saving_listeners: Sequence[CheckpointSaverListener] | None,
    role: TrainingRole,
) -> list[SessionRunHook]:
    """Returns this process's training hooks: checkpoint savers first, loggers last."""
    listeners = check_instances("saving_listeners", saving_listeners, CheckpointSaverListener)
    is_chief = role.is_chief
    on_all = [*hooks, *(spec.training_hooks or ())]
    on_chief = list(spec.training_chief_hooks or ()) if is_chief else []
    every_steps = config.log_step_count_steps
    if every_steps is not None and is_chief:
        values = {"loss": "loss", "step": "global_step"}
        on_all.append(LoggingTensorHook(values, every_n_iter=every_steps))
        on_all.append(StepCounterHook(every_steps, output_dir=config.model_dir))
    savers = [hook for hook in (*on_all, *on_chief) if isinstance(hook, CheckpointSaverHook)]
    if savers and listeners:
        savers[0].add_listeners(listeners)
    if not savers and role.saves:
        savers = _savers(spec, config, listeners)
        return [*savers, *on_chief, *on_all]
    return [*on_chief, *on_all]


def _savers(
    spec: EstimatorSpec,
    config: RunConfig,
    listeners: Sequence[CheckpointSaverListener],
) -> list[SessionRunHook]:
    """Returns the checkpoint savers; each process saves its shards."""
    # 0 disables checkpoints, like None.
    secs = config.save_checkpoints_secs or None
    steps = config.save_checkpoints_steps or None
    if secs is not None or steps is not None:
        assert config.model_dir is not None
        return [
            CheckpointSaverHook(
                config.model_dir,
                save_secs=secs,
                save_steps=steps,
                scaffold=spec.scaffold,
                listeners=listeners,
            )
        ]
    if listeners:
        raise ValueError(
            explain(
                "saving_listeners are set, but the RunConfig disables checkpoints.",
                expected="save_checkpoints_steps or save_checkpoints_secs in the RunConfig.",
                fix="set one of the two, or remove saving_listeners.",
            )
        )
    return []
