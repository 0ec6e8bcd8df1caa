"""TrainSpec and EvalSpec: settings of train_and_evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem.estimator.argument_checks import check_instances
from stratagem.estimator.hooks.checkpoint_saver import CheckpointSaverListener
from stratagem.estimator.hooks.session_run_hook import SessionRunHook
from stratagem.estimator.loops.batches import check_input_fn
from stratagem.estimator.number_checks import check_minimum, check_number
from stratagem.estimator.tasks.exporters import Exporter
from stratagem.messages import explain


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
