"""Cost of slow workers over a whole run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from stratagem.observe.stragglers.attribution import Assessment, Cause, find_stragglers
from stratagem.observe.stragglers.windows import Window, WorkerTimes

_MIN_SHARE_OF_RUN = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkerCost:
    """Mean times per step of a worker, and what the others have waited for it. None is unknown.

    `waited_s` is the time that each other worker has waited for it, on average, and `replica_s` the
    sum over all of them. `num_late_steps` of `num_steps` were in windows in which it was late, and
    `late_s` is the wait in each of those, which take `late_step_s`. `cause` is None if it is not
    slow.
    """

    task: str
    num_steps: int
    step_s: float
    input_s: float | None
    work_s: float
    peers_s: float | None
    transfer_s: float | None
    cause: Cause | None
    num_late_steps: int
    late_s: float
    late_step_s: float
    waited_s: float
    replica_s: float
    share: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunCost:
    """Cost of slow workers in a run."""

    workers: tuple[WorkerCost, ...]

    @property
    def slow(self) -> tuple[WorkerCost, ...]:
        """The slow workers, the most expensive first."""
        found = [worker for worker in self.workers if worker.cause is not None]
        return tuple(sorted(found, key=lambda worker: -worker.waited_s))


@dataclasses.dataclass
class _Waits:
    """Waits for a worker in some windows: the steps, their time, and the waits by cause."""

    num_steps: int = 0
    steps_s: float = 0.0
    replica_s: float = 0.0
    by_cause: dict[Cause, float] = dataclasses.field(default_factory=dict)

    @property
    def waited_s(self) -> float:
        return sum(self.by_cause.values())


def cost_of(windows: Sequence[Window], whole_s: float) -> RunCost | None:
    """Sums up the windows of a run of `whole_s`; None without steps of several workers.

    A worker is slow if the others have waited for it for more than a hundredth of the run: less is
    what chance adds up to over thousands of windows.
    """
    waits: dict[str, _Waits] = {}
    for window in windows:
        _add(waits, find_stragglers(window))
    tasks = dict.fromkeys(task for window in windows for one in window.bins for task in one)
    if len(tasks) < 2:
        return None
    workers = [_worker(task, windows, waits.get(task, _Waits()), whole_s) for task in tasks]
    return RunCost(workers=tuple(sorted(workers, key=lambda worker: _number(worker.task))))


def _add(waits: dict[str, _Waits], assessment: Assessment) -> None:
    for straggler in assessment.stragglers:
        own = waits.setdefault(straggler.task, _Waits())
        waited_s = straggler.late_s * assessment.num_steps
        own.num_steps += assessment.num_steps
        own.steps_s += assessment.step_s * assessment.num_steps
        own.replica_s += waited_s * (len(assessment.tasks) - 1)
        own.by_cause[straggler.cause] = own.by_cause.get(straggler.cause, 0.0) + waited_s


def _worker(task: str, windows: Iterable[Window], waits: _Waits, whole_s: float) -> WorkerCost:
    own = [
        (size, one[task])
        for window in windows
        for size, one in zip(window.sizes, window.bins, strict=True)
        if task in one
    ]
    share = waits.waited_s / whole_s if whole_s > 0 else 0.0
    is_slow = share > _MIN_SHARE_OF_RUN
    busy_s, input_s = _mean(own, "busy_s"), _mean(own, "input_s")
    return WorkerCost(
        task=task,
        num_steps=sum(size for size, _ in own),
        step_s=_mean(own, "step_s") or 0.0,
        input_s=input_s,
        work_s=max(0.0, (busy_s or 0.0) - (input_s or 0.0)),
        peers_s=_mean(own, "peers_s"),
        transfer_s=_mean(own, "transfer_s"),
        cause=max(waits.by_cause, key=waits.by_cause.__getitem__) if is_slow else None,
        num_late_steps=waits.num_steps if is_slow else 0,
        late_s=waits.waited_s / waits.num_steps if is_slow else 0.0,
        late_step_s=waits.steps_s / waits.num_steps if is_slow else 0.0,
        waited_s=waits.waited_s if is_slow else 0.0,
        replica_s=waits.replica_s if is_slow else 0.0,
        share=share if is_slow else 0.0,
    )


def _mean(own: Sequence[tuple[int, WorkerTimes]], field: str) -> float | None:
    """Returns the mean over the steps in which it was measured."""
    found = [(size, getattr(times, field)) for size, times in own]
    found = [(size, time_s) for size, time_s in found if time_s is not None]
    count = sum(size for size, _ in found)
    return sum(size * time_s for size, time_s in found) / count if count else None


def _number(task: str) -> tuple[str, int]:
    kind, _, index = task.partition(" ")
    return kind, int(index) if index.isdecimal() else 0
