"""Constructor calls of strategies, recorded so that another process can repeat them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from stratagem.messages import explain
from stratagem.old_names import OLD_ARGUMENTS

__all__ = ["recreatable"]

_P = ParamSpec("_P")


def recreatable(init: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates the `__init__` of a strategy, which then has `recreate`: the call, ready to repeat.

    Raises:
        TypeError: an argument that TensorFlow had; the message names the one to write.
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
