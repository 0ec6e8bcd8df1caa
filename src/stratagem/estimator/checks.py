"""Checks of arguments that Estimators, their specs, hooks and columns share."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from typing import Any, TypeVar

from stratagem.errors import check_type, explain, invalid

_T = TypeVar("_T")


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


def check_number(
    name: str,
    value: object,
    minimum: float | None = None,
    *,
    excluded: bool = False,
    is_integer: bool = True,
    or_none: bool = True,
) -> None:
    """Checks the type of a number, and that it is at least, or above, the minimum."""
    if value is None and or_none:
        return
    kind = numbers.Integral if is_integer else numbers.Real
    wanted = f"{'an integer' if is_integer else 'a number'}{' or None' if or_none else ''}"
    check_type(name, value, lambda one: not isinstance(one, bool) and isinstance(one, kind), wanted)
    number: Any = value
    if minimum is not None and (number < minimum or (excluded and number == minimum)):
        raise invalid(
            f"{name}={value} is out of range.",
            f"a number {'above' if excluded else 'of at least'} {minimum}.",
            f"correct {name}{', or omit it' if or_none else ''}.",
        )


def check_one_of(owner: str, *, is_required: bool = True, **values: object) -> None:
    """Raises ValueError unless exactly one of the values is set, or at most one."""
    num_set = sum(value is not None for value in values.values())
    if num_set > 1 or (is_required and not num_set):
        given = " and ".join(f"{name}={value!r}" for name, value in values.items())
        raise invalid(
            f"{owner} received {given}.",
            f"{'exactly' if is_required else 'at most'} one of the two.",
            f"pass either {' or '.join(values)}, and leave the other None.",
        )


def check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raises ValueError if some names are unknown."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise invalid(
            f"{what} received the unknown names {unknown}.",
            f"names among {known}.",
            "correct the names.",
        )
