"""Input workers that read for lockstep training: each example comes exactly once in an epoch."""

from __future__ import annotations

import collections
import json
import sys
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from validation.chaos.jobs import Outcome
from validation.chaos.jobs.lockstep import RunningFit, draw_variables
from validation.chaos.sandbox import Sandbox

__all__ = ["InputWorkers", "RunningInput"]

_NUM_RANKS, _NUM_EPOCHS, _NUM_EXAMPLES = 2, 2, 360
_PROGRAM = "validation/chaos/jobs/read.py"


class RunningInput(RunningFit):
    """A launch of `read.py` with input workers."""

    def processes(self) -> dict[str, int]:
        """Returns those of any launch, the service, and the input workers that have read."""
        found = super().processes()
        living = self.sandbox.processes()
        readers = sorted(int(path.name[7:]) for path in self.sandbox.notes.glob("reader-*"))
        new = [pid for pid in readers if pid in living and pid not in found.values()]
        found |= {f"input worker {index}": pid for index, pid in enumerate(new)}
        for pid, command in living.items():
            if "input-service" in command and pid not in found.values():
                found["input service"] = pid
        return found

    def _compared(self) -> Outcome:
        lines: list[dict[str, Any]] = []
        for rank in range(_NUM_RANKS):
            if not (self.sandbox.notes / f"end-{rank}").exists():
                return Outcome("wrong", f"exit code 0, and rank {rank} has not ended")
            text = (self.sandbox.notes / f"taken-{rank}").read_text()
            lines += [json.loads(line) for line in text.splitlines()]
        return compare(lines)


def compare(lines: Sequence[Mapping[str, Any]]) -> Outcome:
    """Counts the examples of each epoch."""
    counts = collections.Counter(
        (line["epoch"], example) for line in lines for example in line["examples"]
    )
    every = {(epoch, one) for epoch in range(_NUM_EPOCHS) for one in range(_NUM_EXAMPLES)}
    found = {
        "lost": sorted(every - counts.keys()),
        "repeated": sorted(one for one, count in counts.items() if count > 1),
        "unknown": sorted(counts.keys() - every),
    }
    wrong = [f"{len(some)} {word}: {some[:5]}" for word, some in found.items() if some]
    return Outcome("wrong", "; ".join(wrong)) if wrong else Outcome("identical")


class InputWorkers:
    """Two trainers in lockstep, two input workers, and their dispatcher."""

    name = "input workers"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningInput:
        """Launches the job."""
        programs = sandbox.tree / "runs" / "chaos" / "cache" / "programs"
        programs.mkdir(parents=True, exist_ok=True)
        options = {"workers": _NUM_RANKS, "input-workers": 2, "max-restarts": 10, "grace-s": 3}
        words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        program = [str(sandbox.tree / _PROGRAM), str(sandbox.notes), str(sandbox.work / "files")]
        command = [sys.executable, "-m", "stratagem", "launch", *words, *program]
        return RunningInput(sandbox, command, draw_variables(chance, programs), {}, is_exact=True)
