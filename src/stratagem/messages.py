"""The form of every error message: what was received, what was expected, what to do."""

from __future__ import annotations

__all__ = ["explain"]


def explain(received: str, *, expected: str, fix: str) -> str:
    """Puts the three parts of an error message together.

    Args:
        received: what happened, with the values that were received.
        expected: what would have been right.
        fix: what the caller can do about it.

    Returns:
        One text of three lines.

    Example:
        >>> print(explain("axis=3 is out of range.", expected="-2 <= axis < 2.", fix="pass 0."))
        axis=3 is out of range.
        Expected -2 <= axis < 2.
        Fix: pass 0.
    """
    return f"{received}\nExpected {expected}\nFix: {fix}"
