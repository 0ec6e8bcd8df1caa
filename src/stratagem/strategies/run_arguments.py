"""Checks of what `Strategy.run` is called with."""

from __future__ import annotations

from typing import Any

from stratagem.messages import explain
from stratagem.options import RunOptions

__all__ = ["check_run"]


def check_run(fn: Any, args: Any, options: Any) -> None:
    """Raises where `run` cannot be called so.

    Args:
        fn: the replica function.
        args: its positional arguments.
        options: hints for TPUs.

    Raises:
        TypeError: `fn` cannot be called, or `options` is of another type.
        ValueError: `args` is no tuple or list.
    """
    if not callable(fn):
        raise TypeError(
            explain(
                f"run received fn={fn!r} of type {type(fn).__name__}.",
                expected="a function.",
                fix="pass the function itself and its arguments in `args`.",
            )
        )
    if not isinstance(args, tuple | list):
        raise ValueError(
            explain(
                f"run received args of type {type(args).__name__}.",
                expected="a tuple or list of positional arguments.",
                fix="write args=(value,) with a comma.",
            )
        )
    if options is not None and not isinstance(options, RunOptions):
        raise TypeError(
            explain(
                f"run received options={options!r} of type {type(options).__name__}.",
                expected="sg.RunOptions or None.",
                fix="leave `options` out.",
            )
        )
