"""Exporters: export of the best, the latest or the final checkpoint."""

from __future__ import annotations

import abc
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stratagem.errors import explain
from stratagem.estimator.checks import check_number, check_type
from stratagem.estimator.loops import read_eval_metrics

if TYPE_CHECKING:
    from stratagem.estimator.estimator import Estimator

_logger = logging.getLogger(__name__)


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
        check_number("exports_to_keep", exports_to_keep, 1)
        # Now and not at the first export, which may be hours of training away.
        check_type(
            "serving_input_receiver_fn",
            serving_input_receiver_fn,
            lambda one: one is None or callable(one),
            "a function without arguments that returns a ServingInputReceiver",
            fix="pass sg.estimator.export.build_raw_serving_input_receiver_fn(features).",
        )
        self._name = name
        self._receiver_fn: Any = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text
        self._exports_to_keep = exports_to_keep

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self._name

    def _export(self, estimator: Estimator, export_path: str, checkpoint_path: str) -> str:
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
        estimator: Estimator,
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

    def export(
        self,
        estimator: Estimator,
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
        estimator: Estimator,
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
