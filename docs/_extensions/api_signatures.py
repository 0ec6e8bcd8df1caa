"""Signatures for the pages of the API reference: types as they are written, short defaults."""

from __future__ import annotations

import ast
import enum
import inspect
import re
from typing import Any, Protocol


def signature_of(value: Any, *, skip_first: bool = False) -> str:
    """Returns the parameters of a class or function, or "" where they would not help."""
    if inspect.isclass(value) and _makes_no_call(value):
        return ""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = list(signature.parameters.values())[skip_first:]
    plain = [
        parameter.replace(
            annotation=_annotation(parameter.annotation), default=_default(parameter.default)
        )
        for parameter in parameters
    ]
    returned = inspect.Signature.empty
    if not inspect.isclass(value):
        returned = _annotation(signature.return_annotation)
    return str(signature.replace(parameters=plain, return_annotation=returned))


def type_of(function: Any) -> str:
    """Returns the return type of a property's function as it is written, or ""."""
    found = getattr(function, "__annotations__", {}).get("return", "")
    return str(_annotation(found)) if found else ""


class _Shown:
    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _makes_no_call(cls: type) -> bool:
    if issubclass(cls, enum.Enum) or getattr(cls, "_is_protocol", False):
        return True
    makers = [base for base in cls.__mro__ if "__init__" in vars(base) or "__new__" in vars(base)]
    return makers[0].__module__ in ("builtins", Protocol.__module__)


def _annotation(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = text.replace("stratagem.", "").replace("typing.", "")
    # Sphinx shows `~typing.Any` as `Any`; without the module it links to `sg.checkpoint.Any`.
    return _Shown(re.sub(r"(?<![\w.])Any\b", "~typing.Any", text))


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    if isinstance(value, enum.Enum):
        return _Shown(f"{type(value).__name__}.{value.name}")
    if inspect.isfunction(value) or inspect.isclass(value):
        return _Shown(value.__name__)
    try:
        ast.parse(repr(value), mode="eval")
    except SyntaxError:
        return _Shown("...")
    return value
