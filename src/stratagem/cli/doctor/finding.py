"""`Finding`: one observation about a machine, and the fix if it is a problem."""

from __future__ import annotations

import dataclasses
import enum


class Level(enum.StrEnum):
    """Severity of a finding, from harmless to fatal."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One observation.

    Args:
        topic: heading under which it is shown.
        level: severity.
        text: the observation, with values.
        fix: the remedy; required for warnings and errors.
    """

    topic: str
    level: Level
    text: str
    fix: str = ""

    def __post_init__(self) -> None:
        assert self.fix or self.level in (Level.OK, Level.NOTE), self.text
