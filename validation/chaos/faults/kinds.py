"""Kinds of faults, and what a fault says to the checker."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Protocol

from validation.chaos.sandbox import Sandbox

__all__ = ["Fault", "FaultKind", "Scene", "NotHereError"]


class NotHereError(Exception):
    """A fault that cannot be made here, with the reason."""


class _Disturbed(Protocol):
    def processes(self) -> dict[str, int]: ...
    def ports(self) -> dict[str, tuple[str, int]]: ...
    def files(self) -> dict[str, list[Path]]: ...


@dataclasses.dataclass(frozen=True)
class Scene:
    """Surroundings of a fault: its sandbox, the job, and the source of chance."""

    sandbox: Sandbox
    job: _Disturbed
    chance: Random


@dataclasses.dataclass(kw_only=True)
class Fault:
    """A fault that was made.

    `where` is the process, port or file; `ends` means that the job may end by it; `causes` matches
    the messages that name the cause. `lift` undoes it after `lasts_s`; None for the latter leaves
    it until the job has ended.
    """

    kind: str
    where: str
    ends: bool = False
    causes: str = ""
    lift: Callable[[], None] | None = None
    lasts_s: float | None = None
    at_s: float = 0.0
    detected_s: float | None = None
    resumed_s: float | None = None


@dataclasses.dataclass(frozen=True)
class FaultKind:
    """A kind of fault; `make` raises NotHereError if there is nothing to disturb.

    `variables` are set for the job from its start.
    """

    name: str
    make: Callable[[Scene], Fault]
