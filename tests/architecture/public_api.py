"""Lists the public names with their signatures: `python -m tests.architecture.public_api`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import stratagem

LISTING = Path(__file__).with_name("public_api.txt")
_OPERATORS = ("__init__", "__call__", "__enter__", "__exit__", "__iter__", "__getitem__", "__len__")


def public_api() -> str:
    """Returns one line for each public name: parameters with kinds and defaults, no annotations."""
    lines = [line for name in stratagem.__all__ for line in _lines(f"sg.{name}", _get(name))]
    return "\n".join(lines) + "\n"


def _get(name: str) -> Any:
    return getattr(stratagem, name)


def _lines(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, types.ModuleType):
        yield f"{path} (module)"
        for name in getattr(value, "__all__", ()):
            yield from _lines(f"{path}.{name}", getattr(value, name))
    elif inspect.isclass(value):
        bases = [base.__name__ for base in value.__mro__[1:] if _is_public(base)]
        yield f"{path} (class{': ' + ', '.join(bases) if bases else ''})"
        yield from _members(path, value)
    elif callable(value):
        yield f"{path}{_signature(value)}"
    else:
        yield f"{path} ({type(value).__name__})"


def _members(path: str, cls: type) -> Iterator[str]:
    for name in sorted(dir(cls)):
        owner = next(base for base in cls.__mro__ if name in vars(base) or base is object)
        is_hidden = name.startswith("_") and name not in _OPERATORS
        if is_hidden or not owner.__module__.startswith("stratagem"):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        is_function = inspect.isfunction(member)
        yield f"{path}.{name}{_signature(member) if is_function else ''}"


def _is_public(base: type) -> bool:
    return base.__name__ in stratagem.__all__


def _signature(function: Any) -> str:
    signature = inspect.signature(function)
    plain = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_default(parameter.default))
        for parameter in signature.parameters.values()
    ]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    """Shows a default without the address of an object or the place of a function."""
    if value is inspect.Parameter.empty:
        return value
    if inspect.isfunction(value) or inspect.isclass(value):
        return _Shown(value.__name__)
    return _Shown(type(value).__name__ if " at 0x" in repr(value) else repr(value))


if __name__ == "__main__":
    LISTING.write_text(public_api())
