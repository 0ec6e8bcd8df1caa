"""Replaced attributes of Keras, each declared at the function that makes its replacement.

`@patches(keras.layers.Layer, "build", why=...)` declares that the function gets `Layer.build` and
returns what takes its place. `seam.install` replaces them when `stratagem.keras` is imported.
`docs/design/upstream.md` says what change of Keras would make the replacements unnecessary.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections import defaultdict
from collections.abc import Callable
from typing import Any, TypeVar

import keras

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Patch:
    """A replacement of `name` of a class or module of Keras."""

    owner: Any
    name: str
    replace: Callable[[Any], Any]
    why: str
    is_addition: bool = False  # Keras has no such attribute

    @property
    def is_lost(self) -> bool:
        """True if this Keras lacks the attribute."""
        return not self.is_addition and not hasattr(self.owner, self.name)

    @property
    def full_name(self) -> str:
        """The owner's name and the attribute's."""
        return f"{self.owner.__name__}.{self.name}"

    def install(self) -> None:
        """Replaces the attribute."""
        setattr(self.owner, self.name, self.replace(getattr(self.owner, self.name, None)))


declared: dict[str, list[Patch]] = defaultdict(list)  # by the module that declares them


def patches(
    owner: Any, *names: str, why: str, is_addition: bool = False
) -> Callable[[_Function], _Function]:
    """Declares that a function replaces these attributes of a class or module of Keras."""

    def declare(replace: _Function) -> _Function:
        declared[replace.__module__] += [
            Patch(owner, name, replace, why, is_addition) for name in names
        ]
        return replace

    return declare


# Methods that models of other libraries have, by name.
_wraps: dict[str, Callable[..., Any]] = {}


def wraps_methods(*names: str) -> Callable[[_Function], _Function]:
    """Declares that a function wraps these methods of each class of models, such as KerasHub's."""

    def declare(wrap: _Function) -> _Function:
        _wraps.update(dict.fromkeys(names, wrap))
        return wrap

    return declare


def wrapping_methods(wraps: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Returns a replacement of `Model.__new__` that wraps methods of each class of models once."""
    wrapped: set[type] = {keras.Model}

    def replace(original: Callable[..., Any]) -> Any:
        def create(cls: type, *args: object, **kwargs: object) -> Any:
            for base in cls.__mro__:
                if issubclass(base, keras.Model) and base not in wrapped:
                    wrapped.add(base)
                    for name, wrap in wraps.items():
                        method = base.__dict__.get(name)
                        if inspect.isfunction(method):
                            setattr(base, name, wrap(method))
            return original(cls, *args, **kwargs)

        return staticmethod(create)

    return replace


patches(keras.Model, "__new__", why="a class may come long after this package is imported")(
    wrapping_methods(_wraps)
)
