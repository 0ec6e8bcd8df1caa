"""Lines of libraries beneath JAX that a user cannot act on."""

from __future__ import annotations

import re

__all__ = ["is_foreign"]

_FOREIGN = re.compile(
    # JAX's coordination service, about a setting that the group of processes needs.
    r"W\d{4} \S+ +\d+ coordination_service\.cc:\d+\] .*Using experimental recoverable task feature"
    # Gloo, each time that processes connect.
    r"|\[Gloo\] Rank \d+ is connected to \d+ peer ranks\."
)


def is_foreign(line: str) -> bool:
    """Returns whether a line of a task is one that only a developer of this library needs.

    Example:
        >>> is_foreign("[Gloo] Rank 1 is connected to 1 peer ranks. Expected number is : 1")
        True
    """
    return _FOREIGN.match(line) is not None
