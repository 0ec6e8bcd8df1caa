"""TrainSpec and EvalSpec: settings of train_and_evaluate."""

from __future__ import annotations

import abc
import dataclasses
import inspect
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from stratagem.errors import explain
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.loops.batches import check_input_fn
from stratagem.estimator.loops.evaluation_record import read_eval_metrics
from stratagem.estimator.number_checks import check_minimum, check_number
from stratagem.estimator.spec import check_instances

# Exporters: export of the best, the latest or the final checkpoint.

_logger = logging.getLogger(__name__)


class Exportable(Protocol):
    """The parts of an `Estimator` that exporters use."""

    @property
    def model_dir(self) -> str: ...  # noqa: D102

    @property
    def export_saved_model(self) -> Callable[..., str]: ...  # noqa: D102


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
        estimator: Exportable,
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
        assets_extra: Mapping[str, str] | None,
        as_text: bool,
        exports_to_keep: int | None,
    ) -> None:
        if serving_input_receiver_fn is not None and not callable(serving_input_receiver_fn):
            raise TypeError(
                explain(
                    f"serving_input_receiver_fn={serving_input_receiver_fn!r} is not callable.",
                    expected="a function without arguments that returns a ServingInputReceiver.",
                    fix="pass sg.estimator.export.build_raw_serving_input_receiver_fn(features).",
                )
            )
        check_minimum("exports_to_keep", exports_to_keep, 1)
        self._name = name
        self._receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self._name

    def _export(self, estimator: Exportable, export_path: str, checkpoint_path: str) -> str:
        path = estimator.export_saved_model(
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )
        self._remove_old(Path(export_path))
        return path

    def _remove_old(self, folder: Path) -> None:
        if self._exports_to_keep is None or not folder.is_dir():
            return
        exports = [path for path in folder.iterdir() if path.name.isdecimal()]
        for path in sorted(exports, key=lambda path: int(path.name))[: -self._exports_to_keep]:
            shutil.rmtree(path, ignore_errors=True)


def _loss_smaller(
    best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]
) -> bool:
    for result in (best_eval_result, current_eval_result):
        if not result or "loss" not in result:
            raise ValueError(
                explain(
                    f"BestExporter cannot compare an evaluation without a loss: {result!r}.",
                    expected="a result with the key 'loss'.",
                    fix="pass BestExporter a compare_fn that compares another metric.",
                )
            )
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
        _check_comparison(compare_fn)
        self._is_better = compare_fn
        self._pattern = event_file_pattern
        self._model_dir: str | None = None
        self._best: Mapping[str, Any] | None = None

    def export(
        self,
        estimator: Exportable,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the checkpoint if it is the best so far."""
        if self._pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_before(Path(estimator.model_dir), eval_result)
        if self._best is not None and not self._better(self._best, eval_result):
            return None
        self._best = eval_result
        _logger.info("Exporting the best model so far: %s.", checkpoint_path)
        return self._export(estimator, export_path, checkpoint_path)

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

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)

    def export(
        self,
        estimator: Exportable,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the checkpoint."""
        return self._export(estimator, export_path, checkpoint_path)


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

    def export(
        self,
        estimator: Exportable,
        export_path: str,
        checkpoint_path: str,
        eval_result: Mapping[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the checkpoint if training has ended."""
        if not is_the_final_export:
            return None
        return self._export(estimator, export_path, checkpoint_path)


def _check_comparison(compare_fn: object) -> None:
    wanted = {"best_eval_result", "current_eval_result"}
    names = set(inspect.signature(compare_fn).parameters) if callable(compare_fn) else set()
    if names != wanted:
        raise ValueError(
            explain(
                f"compare_fn={compare_fn!r} takes the arguments {sorted(names)}.",
                expected=f"a function with exactly the arguments {sorted(wanted)}.",
                fix="rename its arguments: they are passed by name.",
            )
        )


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
        check_input_fn(self.input_fn)
        check_number("max_steps", self.max_steps, is_integer=True)
        check_minimum("max_steps", self.max_steps, 1)
        hooks = check_instances("hooks", self.hooks, SessionRunHook)
        object.__setattr__(self, "hooks", hooks)
        listeners = check_instances(
            "saving_listeners", self.saving_listeners, CheckpointSaverListener
        )
        object.__setattr__(self, "saving_listeners", listeners)


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
        check_input_fn(self.input_fn)
        check_number("steps", self.steps, is_integer=True)
        check_minimum("steps", self.steps, 1)
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(
                explain(
                    f"name={self.name!r} is of type {type(self.name).__name__}.",
                    expected="a string or None.",
                    fix='pass name="test", for example.',
                )
            )
        hooks = check_instances("hooks", self.hooks, SessionRunHook)
        object.__setattr__(self, "hooks", hooks)
        object.__setattr__(self, "exporters", _checked_exporters(self.exporters))
        check_minimum("start_delay_secs", self.start_delay_secs, 0)
        check_minimum("throttle_secs", self.throttle_secs, 0)


def _checked_exporters(exporters: object) -> tuple[Exporter, ...]:
    found: tuple[Any, ...] = ()
    if isinstance(exporters, Iterable) and not isinstance(exporters, str):
        found = tuple(exporters)
    elif exporters is not None:
        found = (exporters,)
    for exporter in found:
        if not isinstance(exporter, Exporter):
            raise TypeError(
                explain(
                    f"exporters contains {exporter!r} of type {type(exporter).__name__}.",
                    expected="an Exporter or a list of Exporters.",
                    fix="derive the class from sg.estimator.Exporter.",
                )
            )
    names = [exporter.name for exporter in found]
    if len(set(names)) != len(names) or not all(names):
        raise ValueError(
            explain(
                f"The exporter names {names} are empty or not unique.",
                expected="a different name for each exporter, since it names its folder.",
                fix="give the exporters different names.",
            )
        )
    return found
