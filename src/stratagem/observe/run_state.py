"""State of a run: progress, processes and values, from its events as they arrive."""

from __future__ import annotations

import collections
import dataclasses
import enum
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from stratagem.errors import NotFoundError
from stratagem.observe.events import (
    EndEvent,
    Event,
    FailureEvent,
    MembersEvent,
    MemoryEvent,
    ProcessEvents,
    ProgressEvent,
    RestartEvent,
    RestoredEvent,
    RunFollower,
    StartEvent,
    StepEvent,
)
from stratagem.observe.goodput import Account, account_for
from stratagem.observe.stragglers import Line, Straggler, elapsed_s, find_stragglers, times_of

# State of one process of a run, from its events as they arrive.

# Processes give a sign of life every five seconds.
LOST_AFTER_S = 30.0
_WAITING_AFTER_S = 10.0
_RECENT_S = 10.0


class Phase(enum.Enum):
    """Phase of a process; the values are shown to users."""

    STARTING = "starting"
    RESTARTING = "restarting"
    RUNNING = "running"
    WAITING = "waiting"
    FAILED = "failed"
    LOST = "lost"
    FINISHED = "finished"


class ProcessState:
    """Latest facts about a process. Times are on the run's shared clock, except `heard_s`."""

    def __init__(self, start: StartEvent) -> None:
        self.start = start
        self.last_s = start.time_s
        self.heard_s = start.time_s  # on the clock of the viewer
        self.step: int | None = None
        self.step_s: float | None = None
        self.memory: MemoryEvent | None = None
        self.end: EndEvent | None = None
        self.lost_s: float | None = None  # when another process reported it lost
        self.has_survivors = False  # others continue without it
        self._was_read = False
        self._is_first = True
        self.recent: collections.deque[Line] = collections.deque()  # of ten seconds

    def add(self, news: ProcessEvents, now_s: float) -> None:
        """Adds events that were read at `now_s` on the clock of the viewer."""
        is_new = not self._was_read
        for event in news.events:
            at_s = news.at_s(event)
            self.last_s = max(self.last_s, at_s)
            self._add_event(event, at_s)
        # Clocks may differ: only for events of the past is the time in the file all that we have.
        self.heard_s = min(now_s, self.last_s) if is_new else now_s
        self._was_read = True

    def phase(self, now_s: float) -> Phase:
        """Returns the phase at `now_s` on the clock of the viewer."""
        if self.end is not None and self.end.code == 0:
            return Phase.FINISHED
        if self.end is not None or self.has_survivors:
            return Phase.LOST if self.has_survivors else Phase.FAILED
        is_silent = now_s - self.heard_s > LOST_AFTER_S
        if self.start.task_type == "launcher":
            return Phase.RUNNING  # it has nothing to report between failures
        if is_silent or (self.lost_s is not None and self.lost_s >= self.last_s):
            return Phase.LOST
        if self.start.task_type in ("ps", "evaluator"):
            return Phase.RUNNING
        if self.step_s is None or self._is_first:
            return Phase.RESTARTING if self.start.attempt or self.step_s else Phase.STARTING
        idle_s = now_s - self.heard_s + self.last_s - self.step_s
        allowed_s = max(_WAITING_AFTER_S, 3 / (self.steps_per_s() or 1.0))
        return Phase.WAITING if idle_s > allowed_s else Phase.RUNNING

    def steps_per_s(self) -> float | None:
        """Returns the speed over the last ten seconds of steps; None before the second line."""
        events = [event for _, _, event in self.recent]
        whole_s = sum(map(elapsed_s, events))
        return sum(event.num_steps for event in events) / whole_s if whole_s else None

    def _add_event(self, event: Event, at_s: float) -> None:
        if isinstance(event, StepEvent):
            self.step, self.step_s = event.step, at_s
            if not self._is_first:  # the first steps contain the compilation
                self.recent.append((self.start.task, at_s, event))
                while len(self.recent) > 1 and self.recent[0][1] < at_s - _RECENT_S:
                    self.recent.popleft()
            self._is_first = False
        elif isinstance(event, RestoredEvent):
            self.step, self._is_first = event.step, True
        elif isinstance(event, ProgressEvent):
            self.step = max(self.step or 0, event.step)
        elif isinstance(event, FailureEvent):
            self._is_first = True
        elif isinstance(event, MemoryEvent):
            self.memory = event
        elif isinstance(event, EndEvent):
            self.end = event


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskView:
    """A task of the latest launch, by its latest process. None is unknown.

    `heard_s` is the time since its last event. The others wait `late_s` of each step for a slow
    worker, and `cause` says why; None for all others.
    """

    task: str
    phase: str
    attempt: int
    step: int | None
    heard_s: float
    cause: str | None
    late_s: float | None
    host_bytes: int | None
    device_bytes: int | None
    device_limit_bytes: int | None
    note: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """State of a run at one moment. None is unknown.

    Speed is the fastest worker's over the last ten seconds of steps. `values` are the latest loss
    and metrics, and a value of None is not finite. `stragglers` has a sentence for each slow
    worker. In an elastic group, `num_members` of `num_expected` workers train.
    """

    age_s: float
    num_launches: int
    is_over: bool
    step: int | None
    total_steps: int | None
    epoch: int | None
    num_epochs: int | None
    steps_per_s: float | None
    left_s: float | None
    values: dict[str, float | None]
    num_restarts: int
    tasks: tuple[TaskView, ...]
    stragglers: tuple[str, ...]
    num_members: int | None
    num_expected: int | None

    def as_dict(self) -> dict[str, Any]:
        """Returns all fields, ready for JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loss:
    """A report that a task was lost: the times of the last step before it and of the report."""

    since_s: float
    at_s: float
    why: str
    has_survivors: bool


class RunState:
    """Collects the events of a run folder. Its work grows with new events only.

    With several launches in one folder, the state is the latest one's. A launch begins when a task
    starts for the first time again after all training processes have fallen silent.
    """

    def __init__(self) -> None:
        self._num_launches = 0
        self._begin_s = 0.0
        self._reset()

    def add(self, news: Iterable[ProcessEvents], now_s: float) -> None:
        """Adds new events by process, ordered by start, read at `now_s` on the viewer's clock."""
        for one in news:
            if one.start not in self._processes:
                if self._begins_launch(one.start):
                    self._reset()
                    self._begin_s = one.start.time_s
                    self._num_launches += 1
                self._processes[one.start] = ProcessState(one.start)
            self._processes[one.start].add(one, now_s)
            self._add_events(one)

    def snapshot(self, now_s: float) -> RunSnapshot:
        """Returns the state at `now_s` on the viewer's clock."""
        by_time = sorted(self._processes.values(), key=lambda one: one.start.time_s)
        latest = {one.start.task: one for one in by_time}
        for task, loss in self._losses.items():
            if task in latest and loss.since_s >= latest[task].start.time_s:
                latest[task].lost_s = loss.at_s
                latest[task].has_survivors = loss.has_survivors
        trainers = [one for one in latest.values() if one.start.trains]
        leader = max(trainers, key=lambda one: one.step_s or 0.0, default=None)
        # A launcher may start ended tasks again.
        group = [*trainers, *(one for one in latest.values() if one.start.task_type == "launcher")]
        is_over = bool(trainers) and all(one.end is not None or one.has_survivors for one in group)
        progress = self._progress
        total = None if progress is None else progress.total_steps
        step = self._step(leader)
        is_moving = leader is not None and leader.phase(now_s) is Phase.RUNNING
        speed = max((one.steps_per_s() or 0.0 for one in trainers), default=0.0) or None
        left_s = max(0, total - step) / speed if total and step and speed and is_moving else None
        end_s = max((one.last_s for one in latest.values()), default=0.0) if is_over else now_s
        stragglers = find_stragglers(times_of(line for one in trainers for line in one.recent))
        members = self._members
        # The others do not start again with a member of an elastic group.
        attempts = [one.start.attempt for one in trainers] if members is None else []
        return RunSnapshot(
            age_s=max(0.0, end_s - self._begin_s) if latest else 0.0,
            num_launches=self._num_launches,
            is_over=is_over,
            step=step,
            total_steps=total,
            epoch=None if progress is None else progress.epoch,
            num_epochs=None if progress is None else progress.num_epochs,
            steps_per_s=speed,
            left_s=left_s,
            values=dict(self._values),
            num_restarts=max([self._num_restarts, *attempts]),
            tasks=_task_views(list(latest.values()), now_s, self._losses, stragglers),
            stragglers=tuple(one.text for one in stragglers),
            num_members=None if members is None else members.num_members,
            num_expected=None if members is None else members.num_expected,
        )

    def _reset(self) -> None:
        self._processes: dict[StartEvent, ProcessState] = {}
        self._progress: ProgressEvent | None = None
        self._progress_s = 0.0
        self._values: dict[str, float | None] = {}
        self._values_s = 0.0
        self._num_restarts = 0
        self._losses: dict[str, _Loss] = {}  # by task
        self._members: MembersEvent | None = None
        self._members_s = 0.0

    def _step(self, leader: ProcessState | None) -> int | None:
        if leader is None or leader.step is None:
            return None if self._progress is None else self._progress.step
        return leader.step

    def _begins_launch(self, start: StartEvent) -> bool:
        trainers = [one for one in self._processes.values() if one.start.trains]
        is_silent = all(one.last_s < start.time_s for one in trainers)
        is_again = start.attempt == 0 and any(one.task == start.task for one in self._processes)
        return not self._processes or (is_again and is_silent)

    def _add_events(self, news: ProcessEvents) -> None:
        for event in news.events:
            at_s = news.at_s(event)
            if isinstance(event, ProgressEvent):
                self._add_progress(event, at_s)
            elif isinstance(event, RestartEvent):
                self._num_restarts = max(self._num_restarts, event.attempt)
            elif isinstance(event, FailureEvent) and event.lost is not None:
                self._losses[event.lost] = _Loss(
                    since_s=at_s, at_s=at_s, why=event.reason, has_survivors=False
                )
            elif isinstance(event, MembersEvent):
                self._add_members(event, at_s)

    def _add_members(self, event: MembersEvent, at_s: float) -> None:
        if at_s >= self._members_s:
            self._members, self._members_s = event, at_s
        since_s = at_s - (event.pause_s or 0.0) - (event.step_s or 0.0)
        for task in event.lost:
            self._losses[task] = _Loss(
                since_s=since_s, at_s=at_s, why="the others continue", has_survivors=True
            )

    def _add_progress(self, event: ProgressEvent, at_s: float) -> None:
        if at_s >= self._progress_s:
            self._progress, self._progress_s = event, at_s
        if event.values and at_s >= self._values_s:
            self._values, self._values_s = event.values, at_s


def _task_views(
    processes: Sequence[ProcessState],
    now_s: float,
    losses: Mapping[str, _Loss],
    stragglers: Sequence[Straggler],
) -> tuple[TaskView, ...]:
    late = {one.task: one for one in stragglers}
    views: list[TaskView] = []
    for process in sorted(processes, key=lambda one: (one.start.task_type, one.start.task_index)):
        phase, memory = process.phase(now_s), process.memory
        straggler = late.get(process.start.task)
        views.append(
            TaskView(
                task=process.start.task,
                phase=phase.value,
                attempt=process.start.attempt,
                step=process.step,
                heard_s=max(0.0, now_s - process.heard_s),
                cause=None if straggler is None else straggler.cause.value,
                late_s=None if straggler is None else straggler.late_s,
                host_bytes=None if memory is None else memory.host_bytes,
                device_bytes=None if memory is None else memory.device_bytes,
                device_limit_bytes=None if memory is None else memory.device_limit_bytes,
                note=_note(process, phase, losses),
            )
        )
    return tuple(views)


def _note(process: ProcessState, phase: Phase, losses: Mapping[str, _Loss]) -> str:
    restarted = f"restarted {process.start.attempt}x" if process.start.attempt else ""
    why = ""
    if phase is Phase.FAILED and process.end is not None:
        why = process.end.reason or f"exit code {process.end.code}"
    elif phase is Phase.LOST:
        loss = losses.get(process.start.task)
        why = "no sign of life" if loss is None else loss.why
    return "; ".join(part for part in (restarted, why) if part)


# `Watcher`: follows a run folder, and recomputes its account at a bounded cost.

# At most this share of the time is spent on accounts, which take longer the longer a run is.
_ACCOUNT_SHARE = 0.05


class Watcher:
    """State and account of a growing run folder. `poll` reads new events only."""

    def __init__(
        self, run_dir: str | os.PathLike[str], clock: Callable[[], float] = time.time
    ) -> None:
        self._follower = RunFollower(run_dir)
        self._state = RunState()
        self._clock = clock
        self._account: Account | None = None
        self._is_stale = False
        self._next_account_s = 0.0
        # A server of metrics and a view may share the watcher.
        self._lock = threading.Lock()

    def poll(self) -> RunSnapshot:
        """Reads new events and returns the state; the account follows if it is due."""
        with self._lock:
            news = self._follower.poll()
            now_s = self._clock()
            self._state.add(news, now_s)
            self._is_stale = self._is_stale or bool(news)
            state = self._state.snapshot(now_s)
            begin_s = time.perf_counter()
            if self._is_stale and (state.is_over or begin_s >= self._next_account_s):
                self._compute_account(begin_s)
            return state

    def account(self) -> Account | None:
        """Returns the latest account; None without events."""
        return self._account

    def as_dict(self, state: RunSnapshot) -> dict[str, Any]:
        """Returns the state and the account, ready for JSON."""
        account = None if self._account is None else self._account.as_dict()
        return {**state.as_dict(), "account": account}

    def poll_existing(self) -> RunSnapshot:
        """Polls; raises NotFoundError if the folder has no readable events."""
        state = self.poll()
        self._follower.events()
        return state

    def _compute_account(self, begin_s: float) -> None:
        try:
            self._account = account_for(self._follower.events())
        except NotFoundError:
            return
        self._is_stale = False
        took_s = time.perf_counter() - begin_s
        self._next_account_s = begin_s + took_s / _ACCOUNT_SHARE
