"""`explain`: the format of every error message."""

from __future__ import annotations


def explain(received: str, *, expected: str, fix: str, code: str | None = None) -> str:
    """Joins the parts of an error message: the problem with its values, valid values, the remedy.

    `code` names the page in docs/reference/errors that explains the cause.

    Example:
        >>> print(explain("axis=3 is out of range.", expected="-2 <= axis < 2.", fix="pass 0."))
        axis=3 is out of range.
        Expected -2 <= axis < 2.
        Fix: pass 0.
        >>> print(explain("No batch.", expected="one.", fix="repeat the data.", code="SG304"))
        No batch.
        Expected one.
        Fix: repeat the data.
        Help: stratagem explain SG304
    """
    message = f"{received}\nExpected {expected}\nFix: {fix}"
    return message if code is None else f"{message}\nHelp: stratagem explain {code}"
