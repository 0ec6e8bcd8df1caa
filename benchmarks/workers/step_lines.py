"""How a training that is killed tells its steps, and how the driver reads them."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path

__all__ = ["StepLine", "StepTeller", "read_steps"]


@dataclasses.dataclass(frozen=True)
class StepLine:
    """A step that a process has done.

    Args:
        rank: of the process.
        process_id: its id.
        step: how many steps of the training are done.
        time_s: when, by the machine's clock.
    """

    rank: int
    process_id: int
    step: int
    time_s: float


class StepTeller:
    """Writes a line for each step, whole and at once.

    Args:
        folder: of the run.
        rank: of this process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"steps-{rank}", flags, 0o644)

    def tell(self, step: int) -> None:
        """Tells that so many steps are done."""
        os.write(self._file, f"{os.getpid()} {step} {time.time():.6f}\n".encode())


def read_steps(folder: Path) -> list[StepLine]:
    """Returns the steps that were told so far, the earliest first."""
    found: list[StepLine] = []
    for path in folder.glob("steps-*"):
        rank = int(path.name.removeprefix("steps-"))
        for line in path.read_text(encoding="ascii").splitlines():
            process_id, step, time_s = line.split()
            found.append(StepLine(rank, int(process_id), int(step), float(time_s)))
    return sorted(found, key=lambda line: line.time_s)
