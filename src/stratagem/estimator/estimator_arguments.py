"""What an Estimator checks of its arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from stratagem.estimator.hooks import SessionRunHook
from stratagem.estimator.settings.run_config import RunConfig
from stratagem.messages import explain

__all__ = [
    "as_hooks",
    "check_members",
    "check_steps",
    "folder_of",
    "last_step_of",
    "require_config",
]


def check_members(cls: type, base: type) -> None:
    """Refuses a subclass that overrides what the class itself relies on.

    Args:
        cls: the subclass.
        base: `Estimator`.

    Raises:
        ValueError: it overrides members other than `__init__`.
    """
    own = {name for name in vars(base) if not name.startswith("__")}
    overridden = sorted(
        {name for one in cls.__mro__[: cls.__mro__.index(base)] for name in vars(one)} & own
    )
    if overridden:
        raise ValueError(
            explain(
                f"{cls.__name__} overrides {overridden} of Estimator.",
                expected="a subclass that only calls Estimator.__init__ with its model_fn.",
                fix="do it in the model function, in a hook, or in a function that calls the "
                "Estimator.",
            )
        )


def require_config(config: Any) -> RunConfig:
    """Returns the config, or the one that is meant by None.

    Args:
        config: what the Estimator was given.

    Raises:
        TypeError: of another type.
    """
    if config is None:
        return RunConfig()
    if not isinstance(config, RunConfig):
        raise TypeError(
            explain(
                f"config={config!r} is of type {type(config).__name__}.",
                expected="an sg.estimator.RunConfig, or None.",
                fix="pass sg.estimator.RunConfig(...); parameters of the model go into params.",
            )
        )
    return config


def folder_of(model_dir: str | os.PathLike[str] | None, config: RunConfig) -> str | None:
    """Returns the folder of an Estimator.

    Args:
        model_dir: what it was given.
        config: which may name one, too.

    Returns:
        The folder; None where nobody names one.

    Raises:
        ValueError: both name one, and they differ; or an evaluator has none, which would wait for
            checkpoints in a folder of its own.
    """
    if model_dir is None and config.model_dir is None and config.task_type == "evaluator":
        raise ValueError(
            explain(
                "The evaluator of a cluster was given no model_dir.",
                expected="the folder of the training, which all tasks share.",
                fix="pass model_dir to the Estimator, in every task the same.",
            )
        )
    if model_dir is None:
        return config.model_dir
    folder = os.fspath(model_dir)
    if config.model_dir is not None and config.model_dir != folder:
        raise ValueError(
            explain(
                f"model_dir={folder!r} is not the one of the config, {config.model_dir!r}.",
                expected="one folder.",
                fix="leave one of the two out.",
            )
        )
    return folder


def check_steps(name: str, steps: int | None) -> None:
    """Checks a number of steps.

    Args:
        name: of the argument.
        steps: the number; None for no limit.

    Raises:
        ValueError: below 1.
    """
    if steps is not None and steps <= 0:
        raise ValueError(
            explain(
                f"{name}={steps}.",
                expected="at least 1 step, or None for no limit.",
                fix=f"pass a positive number, or leave {name} out.",
            )
        )


def last_step_of(steps: int | None, max_steps: int | None) -> Callable[[int], int | None]:
    """Returns a function from the step that training begins with to the one that it ends with.

    Args:
        steps: how many to train.
        max_steps: the one to end at.

    Raises:
        ValueError: both are given.
    """
    if steps is not None and max_steps is not None:
        raise ValueError(
            explain(
                f"steps={steps} and max_steps={max_steps} are both given.",
                expected="one of them at most.",
                fix="pass steps to train so many more, max_steps to train up to one.",
            )
        )
    return lambda start: max_steps if steps is None else start + steps


def as_hooks(hooks: Sequence[Any] | None) -> list[SessionRunHook]:
    """Returns hooks as a list.

    Args:
        hooks: what a method was given.

    Raises:
        TypeError: something else among them.
    """
    given = list(hooks or ())
    for hook in given:
        if not isinstance(hook, SessionRunHook):
            raise TypeError(
                explain(
                    f"hooks contain {hook!r} of type {type(hook).__name__}.",
                    expected="objects of subclasses of sg.estimator.SessionRunHook.",
                    fix="subclass SessionRunHook and pass an object of that class.",
                )
            )
    return given
