"""Filter for log lines of JAX's own libraries that users cannot act on."""

from __future__ import annotations

import re

_FOREIGN = re.compile(
    # JAX's coordination service, about a setting that process groups need.
    r"W\d{4} \S+ +\d+ coordination_service\.cc:\d+\] .*Using experimental recoverable task feature"
    # Gloo, whenever processes connect; threads that write at once mix their lines.
    r"|\[Gloo\] Rank (\[Gloo\]|\d+ is connected to \d+ peer ranks\.)"
    r"|\d+ is connected to \d+ peer ranks\. Expected number of connected peer ranks is"
)


def is_foreign(line: str) -> bool:
    """Returns True for a line that only developers of this package need.

    Example:
        >>> is_foreign("[Gloo] Rank 1 is connected to 1 peer ranks. Expected number is : 1")
        True
    """
    return _FOREIGN.match(line) is not None
