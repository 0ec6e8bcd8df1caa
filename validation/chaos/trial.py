"""One trial: starts a job, disturbs it, and judges its end."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

from validation.chaos.faults import KINDS, clock, crash_points
from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene
from validation.chaos.jobs import GOOD, Ended, Job, Outcome, RunningJob
from validation.chaos.jobs.table import JOBS
from validation.chaos.sandbox import PATIENCE, Sandbox, enter

__all__ = ["LIMIT_S", "Trial", "draw"]

# Far more than any limit of the job's; a busy machine takes long to start and to end processes.
LIMIT_S = 60.0 * PATIENCE
_POLL_S = 0.05
_KEPT_CHARACTERS = 8000
# Records of trials with a bad end.
_KEPT = Path("runs", "chaos", "kept")
_MAX_ROUNDS = 3
_MAX_TRIES = 3
_TWO_AT_ONCE = 0.2
_DURING_START = 0.3
_START_S = 8.0
# Until the first steps: programs are compiled, on a machine that may be busy.
_STARTED_LIMIT_S = 150.0 * PATIENCE
_STEPS_BETWEEN = (3, 30)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """What is drawn before the start: the job, and the kinds of faults of each round.

    A fault that cannot be made is replaced by another one of `kinds`.
    """

    seed: int
    job: Job
    kinds: tuple[FaultKind, ...]
    rounds: tuple[tuple[FaultKind, ...], ...]


def draw(seed: int, job: str | None, fault: str | None) -> Trial:
    """Draws a trial; `job` and `fault` restrict it to those names."""
    chance = Random(seed)
    jobs = [one for one in JOBS if job in (None, one.name)]
    kinds = tuple(one for one in KINDS if fault in (None, one.name))
    if not jobs or not kinds:
        names = [one.name for one in (*JOBS, *KINDS)]
        raise SystemExit(f"Unknown job {job!r} or fault {fault!r}. Expected one of {names}.")
    rounds = tuple(
        tuple(chance.choice(kinds) for _ in range(1 + (chance.random() < _TWO_AT_ONCE)))
        for _ in range(chance.randint(1, _MAX_ROUNDS))
    )
    return Trial(seed=seed, job=chance.choice(jobs), kinds=kinds, rounds=rounds)


class _Disturbance:
    """The faults of a running job: when they are made, noticed, lifted, and overcome."""

    def __init__(self, job: RunningJob, sandbox: Sandbox, chance: Random) -> None:
        self.faults: list[Fault] = []
        self.skipped: list[str] = []
        self._job = job
        self._chance = chance
        self._scene = Scene(sandbox=sandbox, job=job, chance=chance)
        self._to_lift: list[tuple[float, Fault]] = []
        self._steps = 0
        self._stepped_s: list[float] = []

    def wait(self, steps: int, limit_s: float) -> bool:
        """Waits for so many more steps; False if the job ended, or over the limit, before."""
        before, deadline_s = self._job.steps(), time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            self._observe()
            if self._job.steps() - before >= steps:
                return True
            if self._job.wait(_POLL_S).code is not None:
                return False
        return False

    def make(self, kinds: tuple[FaultKind, ...], others: tuple[FaultKind, ...]) -> None:
        """Makes faults at once; one of `others` in place of one that cannot be made."""
        for kind in kinds:
            fault = self._made(kind)
            for _ in range(_MAX_TRIES):
                fault = fault or self._made(self._chance.choice(others))
            if fault is None:
                continue
            self.faults.append(fault)
            if fault.lift is not None and fault.lasts_s is not None:
                self._to_lift.append((fault.at_s + fault.lasts_s, fault))

    def _made(self, kind: FaultKind) -> Fault | None:
        try:
            fault = kind.make(self._scene)
        except NotHereError as reason:
            self.skipped.append(f"{kind.name}: {reason}")
            return None
        fault.at_s = time.monotonic()
        return fault

    def end(self, limit_s: float) -> Ended:
        """Waits for the end of the job."""
        self._job.hurry()
        deadline_s, seen = time.monotonic() + limit_s, self._progress()
        while time.monotonic() < deadline_s:
            self._observe()
            ended = self._job.wait(_POLL_S)
            if ended.code is not None:
                return ended
            if (now := self._progress()) != seen:
                deadline_s, seen = time.monotonic() + limit_s, now
        return self._job.wait(0.0)

    def _progress(self) -> tuple[int, int]:
        """Steps and reported failures: as long as there are more of them, the job does not hang."""
        return self._job.steps(), len(self._job.noticed_s())

    def lift_all(self) -> None:
        """Undoes all faults."""
        for fault in self.faults:
            if fault.lift is not None:
                fault.lift()
                fault.lift = None

    def _observe(self) -> None:
        now_s = time.monotonic()
        for due_s, fault in self._to_lift:
            if now_s >= due_s and fault.lift is not None:
                fault.lift()
                fault.lift = None
        if (steps := self._job.steps()) != self._steps:
            self._steps = steps
            self._stepped_s.append(now_s)

    def note_times(self) -> None:
        """Notes when each fault was noticed, and the first step after that."""
        noticed_s = self._job.noticed_s()
        for fault in self.faults:
            later = [at_s - fault.at_s for at_s in noticed_s if at_s >= fault.at_s]
            fault.detected_s = min(later, default=None)
            since_s = fault.at_s + (fault.detected_s or 0.0)
            steps_s = [at_s - fault.at_s for at_s in self._stepped_s if at_s > since_s]
            fault.resumed_s = min(steps_s, default=None)


def _disturb(trial: Trial, disturbance: _Disturbance, chance: Random) -> None:
    for number, kinds in enumerate(trial.rounds):
        limit_s = LIMIT_S if disturbance.faults else _STARTED_LIMIT_S
        if number == 0 and chance.random() < _DURING_START:
            disturbance.wait(10**9, chance.uniform(0, _START_S))
        elif not disturbance.wait(chance.randint(*_STEPS_BETWEEN), limit_s):
            return
        disturbance.make(kinds, trial.kinds)


def run(trial: Trial, sandbox: Sandbox) -> dict[str, Any]:
    """Runs a trial in this process's sandbox; returns what its line of the results says."""
    chance = Random(f"{trial.seed} run")
    started_s = time.monotonic()
    job = trial.job.start(sandbox, chance)
    disturbance = _Disturbance(job, sandbox, chance)
    try:
        _disturb(trial, disturbance, chance)
        ended = disturbance.end(LIMIT_S)
        disturbance.note_times()
        stacks = sandbox.stacks() if ended.hang else ""
        disturbance.lift_all()
        outcome = job.verdict(ended, disturbance.faults)
        left = sandbox.leftovers() if outcome.kind in GOOD else []
        if left:
            outcome = Outcome("leftover", "\n".join(left))
        if outcome.kind not in GOOD:
            kept = sandbox.tree / _KEPT / str(trial.seed)
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(sandbox.notes, kept)
    finally:
        disturbance.lift_all()
        sandbox.kill_all()
        sandbox.remove()
    return {
        "seed": trial.seed,
        "job": trial.job.name,
        "faults": [_described(fault) for fault in disturbance.faults],
        "skipped": disturbance.skipped,
        "outcome": outcome.kind,
        "why": outcome.why,
        "code": ended.code,
        "took_s": round(time.monotonic() - started_s, 1),
        "output": ended.output[-_KEPT_CHARACTERS:],
        "stacks": stacks,
    }


def _described(fault: Fault) -> Mapping[str, Any]:
    return {
        "kind": fault.kind,
        "where": fault.where,
        "detected_s": fault.detected_s and round(fault.detected_s, 2),
        "resumed_s": fault.resumed_s and round(fault.resumed_s, 2),
    }


def main() -> None:
    """Runs a trial in the namespaces of this process: SEED JOB FAULT RESULT."""
    seed, job, fault, result = sys.argv[1:]
    trial = draw(int(seed), job or None, fault or None)
    sandbox = enter()
    if any(kind in clock.KINDS for kinds in trial.rounds for kind in kinds):
        sandbox = dataclasses.replace(sandbox, more_variables=clock.variables(sandbox))
    if any(kind in crash_points.KINDS for kinds in trial.rounds for kind in kinds):
        more = crash_points.variables(sandbox, sandbox.more_variables)
        sandbox = dataclasses.replace(sandbox, more_variables={**sandbox.more_variables, **more})
    Path(result).write_text(json.dumps(run(trial, sandbox)))


if __name__ == "__main__":
    main()
