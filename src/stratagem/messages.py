"""`explain`: the three-sentence format of every error message."""

from __future__ import annotations

__all__ = ["explain"]


def explain(received: str, *, expected: str, fix: str) -> str:
    """Joins the parts of an error message: the problem with its values, valid values, the remedy.

    Example:
        >>> print(explain("axis=3 is out of range.", expected="-2 <= axis < 2.", fix="pass 0."))
        axis=3 is out of range.
        Expected -2 <= axis < 2.
        Fix: pass 0.
    """
    return f"{received}\nExpected {expected}\nFix: {fix}"
