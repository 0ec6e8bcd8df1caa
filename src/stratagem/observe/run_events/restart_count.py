"""Number of earlier starts of this process's task, as the launcher sets it."""

from __future__ import annotations

from stratagem import environment
from stratagem.messages import explain


def restart_count() -> int:
    """Returns STRATAGEM_RESTART_COUNT, or 0; raises ValueError if it is not a count."""
    text = environment.lookup("STRATAGEM_RESTART_COUNT") or "0"
    if not text.isdecimal():
        raise ValueError(
            explain(
                f"STRATAGEM_RESTART_COUNT={text!r} is not a count.",
                expected="the number of earlier starts: 0, 1, 2, ...",
                fix="unset it (the launcher sets it), or pass attempt=.",
            )
        )
    return int(text)
