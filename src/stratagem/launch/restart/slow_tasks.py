"""Slow tasks of a launch: reports them, and chooses those to end."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection

from stratagem.errors import explain
from stratagem.launch.plan.options import LaunchOptions
from stratagem.observe.run_events.reader import RunFollower
from stratagem.observe.run_events.records import StepEvent
from stratagem.observe.stragglers.attribution import (
    Assessment,
    EvictionRule,
    Straggler,
    choose_eviction,
    find_stragglers,
    sentence,
    slow_since,
)
from stratagem.observe.stragglers.lines import SettledLines
from stratagem.observe.stragglers.windows import MIN_STEPS, WINDOW_S, windows_of

_POLL_EVERY_S = 2.0
# A worker that is slow for a single window is not worth a message.
_SAY_AFTER_S = WINDOW_S / 2
_ANY = EvictionRule(factor=1.0, after_s=_SAY_AFTER_S, max_evictions=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlowTask:
    """A slow task. `reason` says why it is ended, and is empty if it is not."""

    straggler: Straggler
    step_s: float
    reason: str = ""

    @property
    def text(self) -> str:
        """The message about it."""
        one = self.straggler
        found = sentence(one.task, one.cause, one.late_s, self.step_s)
        return f"Ending {one.task}: {self.reason}. {found}." if self.reason else f"{found}."


class SlowTasks:
    """Follows the step events of the tasks, a window of time after the other.

    Times are of `time.monotonic`. Events are released once they are read.
    """

    def __init__(self, options: LaunchOptions, run_dir: str | os.PathLike[str]) -> None:
        self._rule = EvictionRule(
            factor=options.evict_slow or 1.0,
            after_s=options.evict_after_s,
            max_evictions=0 if options.evict_slow is None else options.max_evictions,
            min_workers=options.min_workers or 0,
        )
        self._follower = RunFollower(run_dir, retains_events=False)
        self._num_evicted = 0
        self._settled = SettledLines()
        self._lines: list[tuple[str, float, StepEvent]] = []
        self._begun_s = self._polled_s = 0.0
        # Since when each task is slow, and as slow as the rule says; and those reported.
        self._slow_s: dict[str, float] = {}
        self._evictable_s: dict[str, float] = {}
        self._said: set[str] = set()

    def begin(self, now_s: float) -> None:
        """Begins with new processes: what was found about the earlier ones counts no more."""
        self._follower.poll()  # of an earlier start
        self._settled = SettledLines()
        self._forget(now_s)
        self._said = set()

    def find(self, now_s: float, running: Collection[str]) -> list[SlowTask]:
        """Returns the slow tasks to report now, and at most one to end, among those that run."""
        if now_s - self._polled_s < _POLL_EVERY_S:
            return []
        self._polled_s = now_s
        for news in self._follower.poll():
            self._lines += self._settled.pick(news)
        if now_s - self._begun_s < WINDOW_S:
            return []
        windows = windows_of(
            (line for line in self._lines if line[0] in running), window_s=math.inf
        )
        if not windows or windows[-1].num_steps < MIN_STEPS:
            return []
        self._lines, self._begun_s = [], now_s
        return self._found(find_stragglers(windows[-1]), now_s)

    def _found(self, assessment: Assessment, now_s: float) -> list[SlowTask]:
        self._slow_s = slow_since(self._slow_s, assessment, _ANY, now_s)
        self._evictable_s = slow_since(self._evictable_s, assessment, self._rule, now_s)
        chosen = choose_eviction(
            self._rule, assessment, self._evictable_s, now_s, num_evicted=self._num_evicted
        )
        if chosen is not None:
            self._num_evicted += 1
            slow_s = now_s - self._evictable_s[chosen.task]
            self._forget(now_s)
            reason = f"it has been slow for {slow_s:.0f} s, and evict_slow is {self._rule.factor:g}"
            return [SlowTask(straggler=chosen, step_s=assessment.step_s, reason=reason)]
        self._said &= self._slow_s.keys()
        new = [
            one
            for one in assessment.stragglers
            if one.task not in self._said and now_s - self._slow_s[one.task] >= _SAY_AFTER_S
        ]
        self._said |= {one.task for one in new}
        return [SlowTask(straggler=one, step_s=assessment.step_s) for one in new]

    def _forget(self, now_s: float) -> None:
        """Begins a new window, in which no task is slow so far."""
        self._lines = []
        self._begun_s = self._polled_s = now_s
        self._slow_s, self._evictable_s = {}, {}


def followed_tasks(options: LaunchOptions) -> SlowTasks | None:
    """Returns what follows the tasks of a launch; None without a folder for their events.

    Raises ValueError if slow tasks are to be ended, and that would end the job or cannot be known.
    """
    if options.evict_slow is not None and (
        options.run_dir is None or not (options.survivors or options.max_restarts)
    ):
        raise ValueError(
            explain(
                f"evict_slow={options.evict_slow:g} with run_dir={options.run_dir!r}, "
                f"survivors={options.survivors} and max_restarts={options.max_restarts}.",
                expected="a run_dir, whose events say who is slow; and survivors=True, or "
                "max_restarts of 1 or more, without which the job ends with the worker.",
                fix="add what is missing, or leave out evict_slow.",
            )
        )
    return None if options.run_dir is None else SlowTasks(options, options.run_dir)
