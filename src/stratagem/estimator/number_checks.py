"""Type and range checks of numeric arguments."""

from __future__ import annotations

import numbers

from stratagem.errors import explain


def check_number(name: str, value: object, *, is_integer: bool) -> None:
    """Raises TypeError unless the value is a number of this kind, or None."""
    kind = numbers.Integral if is_integer else numbers.Real
    if value is not None and (isinstance(value, bool) or not isinstance(value, kind)):
        raise TypeError(
            explain(
                f"{name}={value!r} is of type {type(value).__name__}.",
                expected=f"{'an integer' if is_integer else 'a number'} or None.",
                fix=f"pass a number as {name}, or omit it.",
            )
        )


def check_minimum(
    name: str, value: float | None, minimum: int | None, *, excluded: bool = False
) -> None:
    """Raises ValueError if the value is below the minimum, or equal to an excluded one."""
    if value is None or minimum is None:
        return
    if value < minimum or (excluded and value == minimum):
        raise ValueError(
            explain(
                f"{name}={value} is out of range.",
                expected=f"a number {'above' if excluded else 'of at least'} {minimum}.",
                fix=f"correct {name}, or omit it.",
            )
        )
