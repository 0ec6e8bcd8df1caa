"""Detection of a notebook, and text that a notebook can show."""

from __future__ import annotations

import re
import sys
from typing import Any

# Colors and bold; every other sequence moves a cursor that a notebook does not have.
_STYLE = re.compile(r"\x1b\[[\d;:]*m")
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]"  # control sequences
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # titles, links and other strings
    r"|\x1b[ -/]*[0-~]"
)
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f]")


def notebook_display() -> Any:
    """Returns the module `IPython.display` in the kernel of a notebook; otherwise None."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return sys.modules.get("IPython.display") if hasattr(shell, "kernel") else None


def printable(line: str) -> str:
    r"""Removes control characters, except tabs and the sequences for colors.

    Example:
        >>> printable("\x1b[2K\x1b[32m50%\x1b[0m\x08\x1b]0;title\x07")
        '\x1b[32m50%\x1b[0m'
    """
    line = _SEQUENCE.sub(lambda match: match[0] if _STYLE.fullmatch(match[0]) else "", line)
    return _CONTROL.sub("", line)


def plain_text(line: str) -> str:
    """Removes colors and all other control characters."""
    return _CONTROL.sub("", _SEQUENCE.sub("", line)).replace("\x1b", "")
