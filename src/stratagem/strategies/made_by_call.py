"""How a strategy was made, so that another process can make one like it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Self

from stratagem.messages import explain
from stratagem.old_names import OLD_ARGUMENTS

__all__ = ["MadeByCall"]


class MadeByCall:
    """Remembers the arguments that a call of its class has made it with."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Returns an object that its `__init__` is still to make.

        Raises:
            TypeError: an argument that TensorFlow had.
        """
        for name in OLD_ARGUMENTS.keys() & kwargs.keys():
            if name not in inspect.signature(cls.__init__).parameters:
                raise TypeError(
                    explain(
                        f"{cls.__name__} received {name}={kwargs[name]!r}.",
                        expected="devices.",
                        fix=f"write {OLD_ARGUMENTS[name]}.",
                    )
                )
        made = object.__new__(cls)
        made._made_with = (args, kwargs)
        return made

    @property
    def can_be_made_again(self) -> bool:
        """Whether a call of its class has made it."""
        return self._made_with is not None

    def made_again(self) -> Callable[[], Self]:
        """Returns a function that makes another one with the same arguments, in any process.

        Raises:
            ValueError: it was not made by a call of its class.

        Example:
            >>> make = sg.OneDeviceStrategy("cpu:0").made_again()
            >>> make().num_replicas_in_sync
            1
        """
        if self._made_with is None:
            raise ValueError(
                explain(
                    f"A {type(self).__name__} is to be made again, and no call of its class has "
                    "made it.",
                    expected="an object that a call of its class has made.",
                    fix="pass a function that makes it.",
                )
            )
        args, kwargs = self._made_with
        return functools.partial(type(self), *args, **kwargs)
