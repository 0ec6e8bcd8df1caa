"""Jobs that trials disturb, and what the trials ask of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from validation.chaos.faults.kinds import Fault
from validation.chaos.sandbox import Sandbox

__all__ = ["GOOD", "Ended", "Job", "Outcome", "RunningJob"]

# Ends that are promised; the others are defects: wrong, hang, leftover, unnamed.
GOOD = ("identical", "promised", "error")


@dataclasses.dataclass(frozen=True)
class Outcome:
    """End of a trial: `identical`, `promised`, `error`, or a defect, and why."""

    kind: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a job ended; the code is negative for a signal, and None if it hangs."""

    code: int | None
    output: str

    @property
    def hang(self) -> bool:
        """True if it was over the limit."""
        return self.code is None


class RunningJob(Protocol):
    """A job that was started."""

    def processes(self) -> dict[str, int]:
        """Living processes by name: "launcher", "fork server", "worker 1", "server 0", ..."""
        ...

    def ports(self) -> dict[str, tuple[str, int]]:
        """Addresses of listening ports, by name."""
        ...

    def files(self) -> dict[str, list[Path]]:
        """Files that may be damaged: "checkpoint", "journal"."""
        ...

    def steps(self) -> int:
        """Progress so far, from a file that the job appends to: it never falls."""
        ...

    def hurry(self) -> None:
        """Says that no fault will follow: the job may run to its end without pauses."""
        ...

    def noticed_s(self) -> list[float]:
        """Times (`time.monotonic`) at which the job reported a failure."""
        ...

    def wait(self, timeout_s: float) -> Ended:
        """Waits for its end."""
        ...

    def verdict(self, ended: Ended, faults: Sequence[Fault]) -> Outcome:
        """Judges the end; may start the job again where it promises to resume."""
        ...


class Job(Protocol):
    """A kind of job."""

    name: str

    def start(self, sandbox: Sandbox, chance: Random) -> RunningJob:
        """Starts the job."""
        ...
