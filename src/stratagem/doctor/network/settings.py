"""Limits of a survey."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

__all__ = ["SurveySettings"]


def _silent(text: str) -> None:
    del text


@dataclasses.dataclass(frozen=True)
class SurveySettings:
    """Limits of a survey, and its progress messages.

    Args:
        wait_s: seconds to wait for all hosts at the beginning.
        limit_s: seconds to wait for each connection between hosts.
        transfer_s: seconds of each transfer; 0 for none.
        note: called with what is being done.
    """

    wait_s: float = 60.0
    limit_s: float = 3.0
    transfer_s: float = 0.3
    note: Callable[[str], None] = _silent
