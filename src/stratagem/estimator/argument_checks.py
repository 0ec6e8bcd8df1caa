"""Validation of the arguments of Estimator and its methods."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

from stratagem.estimator.settings.run_config import RunConfig
from stratagem.folders import checked_folder
from stratagem.messages import explain

_T = TypeVar("_T")


def check_members(cls: type, base: type) -> None:
    """Raises ValueError if a subclass overrides a member of Estimator other than `__init__`."""
    members = {name for one in base.__mro__ for name in vars(one) if not name.startswith("__")}
    overridden = sorted(
        {name for one in cls.__mro__[: cls.__mro__.index(base)] for name in vars(one)} & members
    )
    if overridden:
        raise ValueError(
            explain(
                f"{cls.__name__} overrides the Estimator members {overridden}.",
                expected="a subclass that only calls Estimator.__init__ with its model_fn.",
                fix="move the code into the model function, a hook, or a function that calls the "
                "Estimator.",
            )
        )


def require_config(config: object) -> RunConfig:
    """Returns the config, or a default RunConfig for None."""
    if config is None:
        return RunConfig()
    if not isinstance(config, RunConfig):
        raise TypeError(
            explain(
                f"config={config!r} is of type {type(config).__name__}.",
                expected="an sg.estimator.RunConfig or None.",
                fix="pass sg.estimator.RunConfig(...); put model parameters into params.",
            )
        )
    return config


def resolve_model_dir(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str | None:
    """Returns the folder of the argument or the config, or None; an evaluator must have one."""
    if model_dir is None and config.model_dir is None and config.task_type == "evaluator":
        raise ValueError(
            explain(
                "The evaluator task has no model_dir.",
                expected="the training folder, shared by all tasks.",
                fix="pass the same model_dir to the Estimator in every task.",
            )
        )
    if model_dir is None:
        return config.model_dir
    folder = checked_folder("model_dir", model_dir)
    if config.model_dir is not None and config.model_dir != folder:
        raise ValueError(
            explain(
                f"model_dir={folder!r} differs from the config's model_dir={config.model_dir!r}.",
                expected="a single folder.",
                fix="set model_dir in only one of the two.",
            )
        )
    return folder


def last_step_function(steps: int | None, max_steps: int | None) -> Callable[[int], int | None]:
    """Returns a function from the first global step of a run to its last, or None if unlimited."""
    if steps is not None and max_steps is not None:
        raise ValueError(
            explain(
                f"steps={steps} and max_steps={max_steps} are both set.",
                expected="at most one of them.",
                fix="pass steps for a number of additional steps, or max_steps for a global step.",
            )
        )
    return lambda start: max_steps if steps is None else start + steps


def check_instances(name: str, values: object, kind: type[_T]) -> tuple[_T, ...]:
    """Returns a list or tuple of instances of a class as a tuple; an empty one for None."""
    items = () if values is None else values
    if not isinstance(items, list | tuple) or not all(isinstance(item, kind) for item in items):
        raise TypeError(
            explain(
                f"{name}={values!r} is not a list of {kind.__name__} objects.",
                expected=f"a list or tuple of {kind.__name__} objects, or None.",
                fix=f"derive their classes from sg.estimator.{kind.__name__}.",
            )
        )
    return tuple(items)
