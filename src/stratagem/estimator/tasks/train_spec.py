"""What `train_and_evaluate` trains with, and what it evaluates with."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from stratagem.estimator.hooks import CheckpointSaverListener, SessionRunHook, check_listeners
from stratagem.estimator.tasks.exporters import Exporter
from stratagem.messages import explain

__all__ = ["EvalSpec", "TrainSpec"]


@dataclasses.dataclass(frozen=True, eq=False)
class TrainSpec:
    """How to train.

    Args:
        input_fn: gives the data.
        max_steps: the global step at which training ends; None for the end of the data.
        hooks: called around each step, on all workers.
        saving_listeners: told of each checkpoint, on the chief.

    Raises:
        TypeError: an `input_fn` that cannot be called, other hooks, other listeners.
        ValueError: `max_steps` below 1.

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
        _check_input_fn(self.input_fn)
        _check_above_0("max_steps", self.max_steps)
        object.__setattr__(self, "hooks", _checked_hooks(self.hooks))
        listeners = check_listeners("saving_listeners", self.saving_listeners)
        object.__setattr__(self, "saving_listeners", listeners)


@dataclasses.dataclass(frozen=True, eq=False)
class EvalSpec:
    """How to evaluate, and what to export.

    Args:
        input_fn: gives the data.
        steps: how many batches to evaluate; None for all.
        name: of the evaluation, where there are several: a part of the name of its folder.
        hooks: called around each step of evaluation.
        exporters: an `Exporter`, or several with different names.
        start_delay_secs: how long an evaluator waits before it begins.
        throttle_secs: how long it waits, from the start of one evaluation, before the next.

    Raises:
        TypeError: an `input_fn` that cannot be called, a name that is no string, other hooks or
            exporters.
        ValueError: `steps` below 1, a negative time, or two exporters of one name.

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
        _check_input_fn(self.input_fn)
        _check_above_0("steps", self.steps)
        if self.name is not None and not isinstance(self.name, str):
            raise TypeError(
                explain(
                    f"name={self.name!r} is of type {type(self.name).__name__}.",
                    expected="a string, or None.",
                    fix='pass name="test", for example.',
                )
            )
        object.__setattr__(self, "hooks", _checked_hooks(self.hooks))
        object.__setattr__(self, "exporters", _checked_exporters(self.exporters))
        for name in ("start_delay_secs", "throttle_secs"):
            _check_seconds(name, getattr(self, name))


def _check_input_fn(input_fn: object) -> None:
    if not callable(input_fn):
        raise TypeError(
            explain(
                f"input_fn={input_fn!r} cannot be called.",
                expected="a function that returns a dataset.",
                fix="pass lambda: dataset.",
            )
        )


def _check_above_0(name: str, number: object) -> None:
    if number is None:
        return
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise TypeError(
            explain(
                f"{name}={number!r} is of type {type(number).__name__}.",
                expected="a whole number, or None.",
                fix=f"pass int({name}).",
            )
        )
    if number < 1:
        raise ValueError(
            explain(
                f"{name}={number} is out of range.",
                expected="a number of steps, at least 1.",
                fix=f"leave {name} out to go on to the end of the data.",
            )
        )


def _check_seconds(name: str, seconds: float) -> None:
    if seconds < 0:
        raise ValueError(
            explain(
                f"{name}={seconds} is negative.",
                expected="a number of seconds, at least 0.",
                fix=f"pass {name}=0 not to wait.",
            )
        )


def _checked_hooks(hooks: Any) -> tuple[SessionRunHook, ...]:
    given = () if hooks is None else hooks
    if not isinstance(given, list | tuple) or not all(
        isinstance(hook, SessionRunHook) for hook in given
    ):
        raise TypeError(
            explain(
                f"hooks={hooks!r} are not all hooks.",
                expected="a list of SessionRunHook objects.",
                fix="derive the classes from sg.estimator.SessionRunHook.",
            )
        )
    return tuple(given)


def _checked_exporters(exporters: Any) -> tuple[Exporter, ...]:
    found: tuple[Any, ...] = ()
    if isinstance(exporters, Iterable) and not isinstance(exporters, str):
        found = tuple(exporters)
    elif exporters is not None:
        found = (exporters,)
    for exporter in found:
        if not isinstance(exporter, Exporter):
            raise TypeError(
                explain(
                    f"exporters hold {exporter!r}, of type {type(exporter).__name__}.",
                    expected="an Exporter, or a list of them.",
                    fix="derive the class from sg.estimator.Exporter.",
                )
            )
    names = [exporter.name for exporter in found]
    if len(set(names)) != len(names) or not all(names):
        raise ValueError(
            explain(
                f"The exporters have the names {names}.",
                expected="a name of its own for each, as it is also its folder's.",
                fix="give them different names.",
            )
        )
    return found
