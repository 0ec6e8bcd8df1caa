"""Recorded constructor calls of strategies, which another process can repeat."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from stratagem.errors import OLD_ARGUMENTS, explain

_P = ParamSpec("_P")


def recreatable(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates the `__init__` of a strategy: sets `recreate`, a function that repeats the call.

    Raises:
        TypeError: an argument name of TensorFlow; the message has the new name.
    """
    parameters = inspect.signature(init).parameters

    @functools.wraps(init)
    def recorded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        strategy: Any = args[0]
        for name in OLD_ARGUMENTS.keys() & kwargs.keys() - parameters.keys():
            raise TypeError(
                explain(
                    f"{type(strategy).__name__} received {name}={kwargs[name]!r}.",
                    expected="devices.",
                    fix=f"write {OLD_ARGUMENTS[name]}.",
                )
            )
        strategy.recreate = functools.partial(type(strategy), *args[1:], **kwargs)
        init(*args, **kwargs)

    return recorded
