"""train_and_evaluate: its settings, its exporters, and the work of each task of a cluster."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from stratagem import settings
from stratagem.errors import DeadlineExceededError, check_number, check_type, explain, invalid
from stratagem.estimator.checks import check_instances
from stratagem.estimator.estimator import Estimator, remote_cluster_of, run_remotely
from stratagem.estimator.hooks import Clock, SecondOrStepTimer, SessionRunHook
from stratagem.estimator.loops import read_eval_metrics
from stratagem.estimator.run_config import close_strategies, training_strategy
from stratagem.estimator.saving_hooks import CheckpointSaverListener
from stratagem.group.current import current_group
from stratagem.keras.callbacks.checkpoint_loop import StopNotice
from stratagem.launch.remote.server import run_standard_server
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.strategies.collectives import host
from stratagem.strategies.strategy import NonTraining

if TYPE_CHECKING:
    from stratagem.estimator.loops import Session


_logger = logging.getLogger(__name__)


# Exporters: export of the best, the latest or the final checkpoint.


class Exporter(abc.ABC):
    """Exports an Estimator after an evaluation, if the exporter decides to.

    Example:
        >>> class Announce(sg.estimator.Exporter):
        ...     name = "announce"
        ...     def export(self, estimator, export_path, checkpoint_path, eval_result,
        ...                is_the_final_export):
        ...         print(f"loss {eval_result['loss']:.1f}, final: {is_the_final_export}")
        >>> estimator = sg.estimator.BaselineRegressor(optimizer="SGD")
        >>> data = lambda: ({"x": np.zeros(2)}, np.array([1.0, 3.0]))
        >>> _ = sg.estimator.train_and_evaluate(
        ...     estimator, sg.estimator.TrainSpec(data, max_steps=50),
        ...     sg.estimator.EvalSpec(data, steps=1, exporters=[Announce()]))
        loss 1.0, final: True

    Source: tensorflow/estimator exporter.py, Exporter.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """Name of the exporter and of its folder below `model_dir/export`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the checkpoint, or skips it.

        Args:
            estimator: the Estimator.
            export_path: the exporter's folder.
            checkpoint_path: the evaluated checkpoint.
            eval_result: the metrics of the evaluation.
            is_the_final_export: True if training has ended; always False without `max_steps`.

        Returns:
            The path of the export, or None if skipped.
        """


class _ServingExporter(Exporter):
    """Exports prediction functions and keeps the last `exports_to_keep` (None for all)."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any] | None,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        check_number(type(self).__name__, or_none=True, exports_to_keep=exports_to_keep)
        if serving_input_receiver_fn is not None:  # now, and not hours of training later
            wanted = "a function, as build_raw_serving_input_receiver_fn(features) returns"
            check_type("serving_input_receiver_fn", serving_input_receiver_fn, callable, wanted)
        self._receiver_fn: Any = serving_input_receiver_fn
        self._name = name
        self._options: dict[str, Any] = {"assets_extra": assets_extra, "as_text": as_text}
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self._name

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the checkpoint if the exporter wants it, and removes old exports."""
        if not self._wants(estimator, eval_result, is_final=is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path, self._receiver_fn, checkpoint_path=checkpoint_path, **self._options
        )
        folder, num_kept = Path(export_path), self._exports_to_keep
        if num_kept is not None and folder.is_dir():
            exports = [path for path in folder.iterdir() if path.name.isdecimal()]
            for old in sorted(exports, key=lambda path: int(path.name))[:-num_kept]:
                shutil.rmtree(old, ignore_errors=True)
        return path

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], *, is_final: bool) -> bool:
        """Returns whether to export a checkpoint with this result; by default, each one."""
        return True


def _loss_smaller(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    return bool(best_eval_result["loss"] > current_eval_result["loss"])


class BestExporter(_ServingExporter):
    """Exports each checkpoint that beats all earlier ones, including those of earlier runs.

    Args:
        name: the name of the folder.
        serving_input_receiver_fn: returns a `ServingInputReceiver`, which describes the inputs.
        event_file_pattern: the glob of event files below `model_dir` whose folders hold earlier
            evaluations; None to compare with evaluations of this run only.
        compare_fn: called with `best_eval_result` and `current_eval_result`; returns True if the
            current one is better. By default, the lower loss wins.
        assets_extra: files to copy: paths in the export to source paths.
        as_text: True to also write the programs as readable MLIR.
        exports_to_keep: the number of exports to keep; None for all.

    Raises:
        TypeError: if `serving_input_receiver_fn` is not callable.
        ValueError: if `compare_fn` takes other arguments, or `exports_to_keep` is below 1.

    Example:
        >>> exporter = sg.estimator.BestExporter(
        ...     compare_fn=lambda best_eval_result, current_eval_result:
        ...         best_eval_result["accuracy"] < current_eval_result["accuracy"])
        >>> exporter.name
        'best_exporter'

    Source: tensorflow/estimator exporter.py, BestExporter.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = _loss_smaller,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        names = sorted(inspect.signature(compare_fn).parameters) if callable(compare_fn) else []
        if names != ["best_eval_result", "current_eval_result"]:
            raise ValueError(
                f"compare_fn={compare_fn!r} takes the arguments {names}, not best_eval_result and "
                "current_eval_result, by name."
            )
        self._is_better = compare_fn
        self._pattern = event_file_pattern
        self._model_dir: str | None = None
        self._best: Mapping[str, Any] | None = None

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], *, is_final: bool) -> bool:
        if self._pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_before(Path(estimator.model_dir), result)
        if self._best is not None and not self._better(self._best, result):
            return False
        self._best = result
        _logger.info("Exporting the best model so far, of step %s.", result.get("global_step"))
        return True

    def _best_before(self, model_dir: Path, current: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the best recorded evaluation, excluding the current one."""
        best = None
        assert self._pattern is not None
        for folder in sorted(model_dir.glob(str(Path(self._pattern).parent))):
            for step, result in read_eval_metrics(folder).items():
                if step == current.get("global_step"):
                    continue
                if best is None or self._better(best, result):
                    best = result
        return best

    def _better(self, best: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
        return self._is_better(best_eval_result=best, current_eval_result=current)


class LatestExporter(_ServingExporter):
    """Exports each evaluated checkpoint.

    Args:
        name: the name of the folder.
        serving_input_receiver_fn: returns a `ServingInputReceiver`, which describes the inputs.
        assets_extra: files to copy: paths in the export to source paths.
        as_text: True to also write the programs as readable MLIR.
        exports_to_keep: the number of exports to keep; None for all.

    Raises:
        TypeError: if `serving_input_receiver_fn` is not callable.
        ValueError: if `exports_to_keep` is below 1.

    Example:
        >>> sg.estimator.LatestExporter("latest", lambda: None).name
        'latest'

    Source: tensorflow/estimator exporter.py, LatestExporter.
    """


class FinalExporter(_ServingExporter):
    """Exports the last checkpoint, once training has reached `max_steps`.

    Args:
        name: the name of the folder.
        serving_input_receiver_fn: returns a `ServingInputReceiver`, which describes the inputs.
        assets_extra: files to copy: paths in the export to source paths.
        as_text: True to also write the programs as readable MLIR.

    Raises:
        TypeError: if `serving_input_receiver_fn` is not callable.

    Example:
        >>> sg.estimator.FinalExporter("final", lambda: None).name
        'final'

    Source: tensorflow/estimator exporter.py, FinalExporter.
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, None)

    def _wants(self, estimator: Estimator, result: Mapping[str, Any], *, is_final: bool) -> bool:
        return is_final


# TrainSpec and EvalSpec: settings of train_and_evaluate.


@dataclasses.dataclass(frozen=True, eq=False)
class TrainSpec:
    """Training settings of `train_and_evaluate`.

    Args:
        input_fn: returns the training data.
        max_steps: the global step to stop at; None to train to the end of the data.
        hooks: called around each step, on all workers.
        saving_listeners: called around each checkpoint, on the chief.

    Raises:
        TypeError: if `input_fn` is not callable, or a hook or listener has the wrong type.
        ValueError: if `max_steps` is below 1.

    Example:
        >>> spec = sg.estimator.TrainSpec(lambda: [], max_steps=1000)
        >>> spec.hooks
        ()

    Source: tensorflow/estimator training.py, TrainSpec.
    """

    input_fn: Callable[..., Any]
    max_steps: int | None = None
    hooks: Sequence[SessionRunHook] | None = None
    saving_listeners: Sequence[CheckpointSaverListener] | None = None

    def __post_init__(self) -> None:
        check_type("input_fn", self.input_fn, callable, "a function that returns a dataset")
        check_number("TrainSpec", or_none=True, max_steps=self.max_steps)
        kinds = {"hooks": SessionRunHook, "saving_listeners": CheckpointSaverListener}
        for name, kind in kinds.items():
            object.__setattr__(self, name, check_instances(name, getattr(self, name), kind))


@dataclasses.dataclass(frozen=True, eq=False)
class EvalSpec:
    """Evaluation settings and exporters of `train_and_evaluate`.

    Args:
        input_fn: returns the evaluation data.
        steps: the number of global batches to evaluate; None for all.
        name: distinguishes several evaluations; becomes part of the folder name.
        hooks: called around each evaluation step.
        exporters: an `Exporter`, or several with different names.
        start_delay_secs: seconds that a separate evaluator waits before it begins.
        throttle_secs: minimum seconds from the start of one evaluation to the next.

    Raises:
        TypeError: if `input_fn` is not callable, `name` is not a string, or a hook or exporter has
            the wrong type.
        ValueError: if `steps` is below 1, a time is negative, or exporters share a name.

    Example:
        >>> sg.estimator.EvalSpec(lambda: [], throttle_secs=60).steps
        100

    Source: tensorflow/estimator training.py, EvalSpec.
    """

    input_fn: Callable[..., Any]
    steps: int | None = 100
    name: str | None = None
    hooks: Sequence[SessionRunHook] | None = None
    exporters: Exporter | Iterable[Exporter] | None = None
    start_delay_secs: float = 120
    throttle_secs: float = 600

    def __post_init__(self) -> None:
        check_type("input_fn", self.input_fn, callable, "a function that returns a dataset")
        check_number("EvalSpec", or_none=True, steps=self.steps)
        check_type("name", self.name, str | None, "a string or None")
        check_number("EvalSpec", 0.0, start_delay_secs=self.start_delay_secs)
        check_number("EvalSpec", 0.0, throttle_secs=self.throttle_secs)
        object.__setattr__(self, "hooks", check_instances("hooks", self.hooks, SessionRunHook))
        given = () if self.exporters is None else self.exporters
        exporters = tuple(given) if isinstance(given, Iterable) else (given,)
        for exporter in exporters:
            check_type("exporters", exporter, Exporter, "an Exporter or a list of Exporters")
        names = [exporter.name for exporter in exporters]
        if len(set(names)) != len(names) or not all(names):
            raise ValueError(f"The exporter names {names}, of folders, are empty or not unique.")
        object.__setattr__(self, "exporters", exporters)


# Evaluation and export of new checkpoints.


_Results = tuple[Mapping[str, Any] | None, Sequence[str | None] | None]


@dataclasses.dataclass
class CheckpointEvaluator:
    """Evaluates and exports each checkpoint once; `max_steps` of None means no limit.

    `results` are the metrics and exports of the last evaluation, and `done` is its checkpoint.
    """

    estimator: Estimator
    eval_spec: EvalSpec
    max_steps: int | None
    results: _Results = (None, None)
    done: str | None = None
    is_final: bool = False

    def find_new(self) -> str | None:
        """Returns the latest checkpoint if it has not been evaluated yet, else None."""
        path = self.estimator.latest_checkpoint()
        return None if path == self.done else path

    def evaluate(self, checkpoint_path: str, saved_step: int = 0) -> None:
        """Evaluates a checkpoint, of `saved_step` or later, and runs the exporters."""
        metrics = self.estimator.evaluate(
            self.eval_spec.input_fn,
            steps=self.eval_spec.steps,
            hooks=list(self.eval_spec.hooks or ()),
            checkpoint_path=checkpoint_path,
            name=self.eval_spec.name,
        )
        if metrics["global_step"] < saved_step:
            raise self.missing(saved_step)
        limit, exporters = self.max_steps, cast(Iterable[Exporter], self.eval_spec.exporters)
        is_final = limit is not None and metrics["global_step"] >= limit
        exports = [
            exporter.export(
                estimator=self.estimator,
                export_path=os.path.join(self.estimator.model_dir, "export", exporter.name),
                checkpoint_path=checkpoint_path,
                eval_result=metrics,
                is_the_final_export=is_final,
            )
            for exporter in exporters
        ]
        self.done, self.results, self.is_final = checkpoint_path, (metrics, exports), is_final

    def missing(self, step: int) -> RuntimeError:
        """Returns the error for a checkpoint that was saved but is not the folder's latest."""
        return RuntimeError(
            explain(
                f"The checkpoint of step {step} is not in {self.estimator.model_dir}; the latest "
                f"there is {self.estimator.latest_checkpoint()}.",
                expected="the checkpoint just saved, in the Estimator's folder.",
                fix="let the session save, instead of a saver that writes elsewhere; or check "
                "whether another program removes checkpoints.",
            )
        )


class EvaluationListener(CheckpointSaverListener):
    """Evaluates checkpoints in the training process, at most once per `throttle_secs`."""

    def __init__(
        self,
        evaluator: CheckpointEvaluator,
        throttle_secs: float,
        *,
        clock: Clock = time.monotonic,
    ) -> None:
        self._evaluator = evaluator
        self._timer = SecondOrStepTimer(every_secs=throttle_secs, clock=clock)
        self._is_first = True

    def begin(self) -> None:
        """Resets the timer."""
        self._timer.reset()
        self._is_first = True

    def after_save(self, session: Session, global_step_value: int) -> None:
        """Evaluates the checkpoint if the interval has passed."""
        if self._is_first:  # saved before the first step
            self._is_first = False
            return
        is_due = self._timer.should_trigger_for_step(global_step_value)
        # The first process decides, since all of them evaluate together.
        if host.broadcast_object(is_due, name="whether to evaluate the checkpoint"):
            self._evaluate(global_step_value)
        else:
            _logger.info("Not evaluating the checkpoint of step %d yet.", global_step_value)

    def end(self, session: Session, global_step_value: int) -> None:
        """Evaluates the last checkpoint unless already done."""
        if global_step_value != self._timer.last_triggered_step():
            self._evaluate(global_step_value)

    def _evaluate(self, step: int) -> None:
        self._timer.update_last_triggered_step(step)
        path = self._evaluator.find_new()
        if path is None:
            raise self._evaluator.missing(step)
        self._evaluator.evaluate(path, saved_step=step)


# Evaluator task: evaluates checkpoints of a training run in other processes.

_POLL_EVERY_S = 1.0
# Time between log lines during a wait; the first one comes early.
_LOG_EVERY_S = 600.0
_FIRST_LOG_S = 30.0


@dataclasses.dataclass
class EvaluatorLoop:
    """Evaluates and exports each new checkpoint until one reaches `max_steps`.

    Launchers send SIGTERM to the evaluator when training ends. It then finishes the current
    evaluation, and evaluates the newest checkpoint. `timeout_s` limits the wait for each one.

    Source: tensorflow/estimator training.py, _start_continuous_evaluation.
    """

    evaluator: CheckpointEvaluator
    timeout_s: float
    stop_signal: StopNotice
    clock: Clock = time.monotonic

    def run(self) -> None:
        """Evaluates until training ends."""
        evaluator = self.evaluator
        self._pause(evaluator.eval_spec.start_delay_secs)
        while True:
            # Read first: no checkpoint is written after the signal.
            is_over = self.stop_signal.is_given
            path = self._wait_for_checkpoint() if not is_over else evaluator.find_new()
            started_at_s = self.clock()
            if path is not None:
                self._evaluate(path)
            if is_over or evaluator.is_final:
                return
            self._pause(evaluator.eval_spec.throttle_secs - (self.clock() - started_at_s))

    def _evaluate(self, checkpoint_path: str) -> None:
        try:
            self.evaluator.evaluate(checkpoint_path)
        except (OSError, LookupError, ValueError):
            if Path(checkpoint_path).exists():
                raise
            _logger.warning("%s was removed before it was evaluated.", checkpoint_path)
            self.evaluator.done = checkpoint_path

    def _wait_for_checkpoint(self) -> str | None:
        """Returns the next checkpoint, or None if the stop signal arrives first."""
        began_s, next_log_s = self.clock(), _FIRST_LOG_S
        folder = self.evaluator.estimator.model_dir
        while not self.stop_signal.is_given:
            path, waited_s = self.evaluator.find_new(), self.clock() - began_s
            if path is not None:
                return path
            if waited_s >= self.timeout_s:
                raise DeadlineExceededError(
                    explain(
                        f"The evaluator found no new checkpoint in {folder} for {waited_s:.0f} s "
                        f"(last evaluated: {self.evaluator.done or 'none'}).",
                        expected=f"a new one every {self.timeout_s:g} s until max_steps is "
                        "reached.",
                        fix="check that training runs and writes to the same folder; pass "
                        "max_steps in TrainSpec; or raise STRATAGEM_CHECKPOINT_TIMEOUT_S.",
                        code="SG709",
                    )
                )
            if waited_s >= next_log_s:
                next_log_s += _LOG_EVERY_S
                text = "No new checkpoint in %s for %.0f s; waiting up to %g s."
                _logger.warning(text, folder, waited_s, self.timeout_s)
            self.stop_signal.wait(min(_POLL_EVERY_S, self.timeout_s - waited_s))
        return None

    def _pause(self, seconds: float) -> None:
        until_s = self.clock() + seconds
        while not self.stop_signal.is_given and self.clock() < until_s:
            self.stop_signal.wait(until_s - self.clock())


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
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
    check_type("estimator", estimator, Estimator, "an Estimator")
    check_type("train_spec", train_spec, TrainSpec, "a TrainSpec")
    check_type("eval_spec", eval_spec, EvalSpec, "an EvalSpec")
    if remote_cluster_of(estimator.config) is not None:
        return run_remotely(estimator, _run_remote_task, (train_spec, eval_spec))
    if estimator.config.task_type == "evaluator":
        evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
        with StopNotice() as notice:
            limit_s = settings.read("checkpoint_timeout_s")
            EvaluatorLoop(evaluator, limit_s, notice).run()
        return evaluator.results
    if estimator.config.task_type == "ps":
        run_standard_server().join()
        return None, None
    if estimator.config.cluster_spec:
        _run_cluster_task(estimator, train_spec)
        return None, None
    return _run_in_one_process(estimator, train_spec, eval_spec)


def _run_remote_task(estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec) -> _Results:
    """Runs a client's job on one task; a coordinator is the only task with the program."""
    if estimator.config.num_ps_replicas:
        return _run_in_one_process(estimator, train_spec, eval_spec)
    return train_and_evaluate(estimator, train_spec, eval_spec)


def _run_cluster_task(estimator: Estimator, train_spec: TrainSpec) -> None:
    """Trains, or serves a task that coordinates the training."""
    strategy = training_strategy(estimator.config)
    if strategy is not None and isinstance(strategy.executor, NonTraining):
        run_standard_server().join()
        return
    config, group = estimator.config, current_group()
    num_together = 1 if group is None else group.num_processes
    is_lockstep = not isinstance(strategy, RemoteStateStrategy)
    if is_lockstep and num_together != config.num_worker_replicas:
        raise invalid(
            f"{config.task_type} {config.task_id} trains with {num_together} of "
            f"{config.num_worker_replicas} workers in the cluster.",
            expected="a strategy that spans all workers.",
            fix="pass RunConfig(train_distribute=sg.MultiWorkerMirroredStrategy).",
            code="SG902",
        )
    _train(estimator, train_spec, (train_spec.saving_listeners or ()) if config.is_chief else ())
    close_strategies()  # parameter servers end with their leader, after all workers


def _run_in_one_process(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> _Results:
    evaluator = CheckpointEvaluator(estimator, eval_spec, train_spec.max_steps)
    listener = EvaluationListener(evaluator, eval_spec.throttle_secs)
    _train(estimator, train_spec, [*(train_spec.saving_listeners or ()), listener])
    return evaluator.results


def _train(estimator: Estimator, spec: TrainSpec, listeners: Sequence[Any]) -> None:
    estimator.train(
        spec.input_fn,
        hooks=list(spec.hooks or ()),
        max_steps=spec.max_steps,
        saving_listeners=list(listeners),
    )
