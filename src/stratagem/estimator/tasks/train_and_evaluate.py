"""train_and_evaluate: training with evaluation, in one process or as a cluster task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from stratagem.estimator.estimator_protocol import EstimatorProtocol, check_estimator
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.estimator.settings.strategy_choice import close_strategies, training_strategy
from stratagem.estimator.tasks.checkpoint_evaluation import (
    CheckpointEvaluation,
    CheckpointEvaluator,
    EvaluationListener,
)
from stratagem.estimator.tasks.evaluator_task import run_evaluator
from stratagem.estimator.tasks.standalone_client import remote_cluster_of, run_remotely
from stratagem.estimator.tasks.train_spec import EvalSpec, TrainSpec
from stratagem.group.current import current_group
from stratagem.launch.remote.server import run_standard_server
from stratagem.messages import explain
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.strategies.base.non_training import NonTraining

_logger = logging.getLogger(__name__)

_Results = tuple[Mapping[str, Any] | None, Sequence[str | None] | None]


def train_and_evaluate(
    estimator: EstimatorProtocol, train_spec: TrainSpec, eval_spec: EvalSpec
) -> _Results:
    """Trains an Estimator and evaluates its checkpoints; all tasks run the same program.

    A single process trains, evaluates after checkpoints, at most once per
    `eval_spec.throttle_secs`, and evaluates the last checkpoint. `RunConfig` sets the checkpoint
    interval. In a `TF_CONFIG` cluster, the chief and workers train, parameter servers run until
    training ends, and the evaluator evaluates checkpoints until `max_steps`. Without an evaluator,
    nothing is evaluated. With `DistributeConfig(remote_cluster=...)`, all of this happens on the
    remote cluster.

    Args:
        estimator: the Estimator; all tasks share its folder.
        train_spec: the training settings.
        eval_spec: the evaluation settings and exporters.

    Returns:
        A tuple: the metrics of the last evaluation, and a list of the exporters' results. Both are
        None if this task evaluated nothing, or training had already reached `max_steps`.

    Raises:
        TypeError: if an argument has the wrong type.
        DeadlineExceededError: if an evaluator finds no checkpoint in time.
        ValueError: if several workers have no strategy that trains one model.

    Example:
        >>> estimator = sg.estimator.BaselineRegressor(optimizer="SGD")
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1.0, 3.0]))
        >>> specs = sg.estimator.TrainSpec(data, max_steps=50), sg.estimator.EvalSpec(data, steps=1)
        >>> metrics, exports = sg.estimator.train_and_evaluate(estimator, *specs)
        >>> round(float(metrics["loss"]), 2)
        1.0

    Source: tensorflow/estimator training.py, train_and_evaluate.
    """
    check_estimator(estimator)
    _check_spec("train_spec", train_spec, TrainSpec)
    _check_spec("eval_spec", eval_spec, EvalSpec)
    if remote_cluster_of(estimator.config) is not None:
        return run_remotely(estimator, _run_remote_task, (train_spec, eval_spec))
    if estimator.config.task_type == "evaluator":
        return _results(run_evaluator(estimator, train_spec, eval_spec))
    if estimator.config.task_type == "ps":
        run_standard_server().join()
        return None, None
    if estimator.config.cluster_spec:
        _run_cluster_task(estimator, train_spec)
        return None, None
    return _run_in_one_process(estimator, train_spec, eval_spec)


def _run_remote_task(
    estimator: EstimatorProtocol, train_spec: TrainSpec, eval_spec: EvalSpec
) -> _Results:
    """Runs a client's job on one task; a coordinator is the only task with the program."""
    if estimator.config.num_ps_replicas:
        return _run_in_one_process(estimator, train_spec, eval_spec)
    return train_and_evaluate(estimator, train_spec, eval_spec)


def _run_cluster_task(estimator: EstimatorProtocol, train_spec: TrainSpec) -> None:
    """Trains, or serves a task that coordinates the training."""
    strategy = training_strategy(estimator.config)
    if strategy is not None and isinstance(strategy.executor, NonTraining):
        run_standard_server().join()
        return
    if not isinstance(strategy, RemoteStateStrategy):
        _require_lockstep(estimator.config)
    is_chief = estimator.config.is_chief
    _train(estimator, train_spec, (train_spec.saving_listeners or ()) if is_chief else ())
    close_strategies()  # parameter servers end with their leader, after all workers


def _run_in_one_process(
    estimator: EstimatorProtocol, train_spec: TrainSpec, eval_spec: EvalSpec
) -> _Results:
    evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
    listener = EvaluationListener(evaluator, eval_spec.throttle_secs)
    _train(estimator, train_spec, [*(train_spec.saving_listeners or ()), listener])
    return _results(listener.last)


def _require_lockstep(config: RunConfig) -> None:
    group = current_group()
    num_together = 1 if group is None else group.num_processes
    if num_together != config.num_worker_replicas:
        raise ValueError(
            explain(
                f"{config.task_type} {config.task_id} trains with {num_together} of "
                f"{config.num_worker_replicas} workers in the cluster.",
                expected="a strategy that spans all workers.",
                fix="pass RunConfig(train_distribute=sg.MultiWorkerMirroredStrategy).",
                code="SG902",
            )
        )


def _train(estimator: EstimatorProtocol, spec: TrainSpec, listeners: Sequence[Any]) -> None:
    estimator.train(
        spec.input_fn,
        hooks=list(spec.hooks or ()),
        max_steps=spec.max_steps,
        saving_listeners=list(listeners),
    )


def _results(evaluation: CheckpointEvaluation | None) -> _Results:
    return (None, None) if evaluation is None else (evaluation.metrics, evaluation.exports)


def _check_spec(name: str, spec: object, wanted: type) -> None:
    if not isinstance(spec, wanted):
        raise TypeError(
            explain(
                f"{name}={spec!r} is of type {type(spec).__name__}.",
                expected=f"a {wanted.__name__}.",
                fix=f"pass sg.estimator.{wanted.__name__}(input_fn, ...).",
            )
        )
