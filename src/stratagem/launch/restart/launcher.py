"""Starts a plan, again after a failure where that is allowed, and says what has happened."""

from __future__ import annotations

import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Mapping, Sequence

from stratagem import environment
from stratagem.accelerators import local_gpus
from stratagem.launch.plan.devices import uses_gpus
from stratagem.launch.plan.elastic import Discovery, ElasticConfig
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.plan.restart_folders import KeptFolders, kept_folders
from stratagem.launch.plan.task_plan import TaskPlan, plan_tasks
from stratagem.launch.prefork.warm_start import WarmStart, can_be_warm
from stratagem.launch.restart.launch_events import LaunchEvents
from stratagem.launch.restart.membership import notice_after_s, workers_after
from stratagem.launch.restart.policy import cause_of_failure, have_saved_and_left
from stratagem.launch.restart.report import (
    failure_report,
    notice_report,
    restart_report,
    signal_report,
)
from stratagem.launch.restart.restart_count import Restarts
from stratagem.launch.restart.signals import CaughtSignals
from stratagem.launch.restart.task_group import run_group
from stratagem.launch.tasks.exit_status import TaskEnd, exit_code
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output.task_output import Screen
from stratagem.preemption import EXIT_CODE

__all__ = ["Outcome", "launch"]

# How a task ends that others have ended, or that has saved and left.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, EXIT_CODE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the tasks of the last start ended.

    Args:
        ends: the end of each.
        signum: the signal to the launcher that ended them; None without one.
        restart: how often they were started again.
        were_asked: the launcher had asked them to leave, so that more can start.
    """

    ends: tuple[TaskEnd, ...]
    signum: signal.Signals | None
    restart: int
    were_asked: bool = False

    @property
    def cause(self) -> TaskEnd | None:
        """The task that failed first; None if none failed."""
        return cause_of_failure(self.ends)

    @property
    def exit_code(self) -> int:
        """That of the task that failed first, or left when asked, as a shell reports it; else 0.

        A signal that came before any task was started counts like one that ended them.
        """
        if not self.ends and self.signum is not None:  # nothing had been started
            return exit_code(-self.signum)
        left = [end for end in self.ends if self.were_asked and end.trains and end.returncode]
        cause = self.cause or next(iter(left), None)
        return 0 if cause is None else exit_code(cause.returncode)


def launch(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    finish: Callable[[TaskPlan], TaskPlan] | None = None,
    elastic: ElasticConfig | None = None,
) -> Outcome:
    """Runs a command as every task of a cluster on this machine.

    Args:
        command: the program and its arguments.
        options: which tasks there are, what each gets, and how they end.
        finish: completes the plan of each task before it starts.
        elastic: in place of the `min_workers` and `max_workers` of the options.

    Returns:
        How they ended.

    Raises:
        UnavailableError: too few workers could run for longer than the limit.
        ValueError: fewer GPUs than asked for.
        OSError: a process cannot be started, or a file not be written.
    """
    if elastic is not None:
        least, most = elastic.min_workers, elastic.max_workers
        options = dataclasses.replace(options, min_workers=least, max_workers=most)
    else:
        elastic = ElasticConfig(options.min_workers or 1)
    base = environment.snapshot()
    gpus = local_gpus() if uses_gpus(base) else ()
    with (
        CaughtSignals() as caught,
        Guardian() as guardian,
        LaunchEvents(options) as events,
        kept_folders(options, base) as folders,
        WarmStart(base, guardian) as warm_start,
    ):
        is_warm = options.max_restarts > 0 and not options.cold_restarts
        warm = warm_start if is_warm and can_be_warm(command, base) else None
        starts = _Starts(
            command=command,
            options=options,
            finish=finish,
            base=base,
            gpus=gpus,
            caught=caught,
            guardian=guardian,
            events=events,
            folders=folders,
            discovery=Discovery(elastic, options.full_workers),
        )
        return starts.run_all(warm)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Starts:
    """What all starts of one launch have in common."""

    command: Sequence[str]
    options: LaunchOptions
    finish: Callable[[TaskPlan], TaskPlan] | None
    base: Mapping[str, str]
    gpus: Sequence[str]
    caught: CaughtSignals
    guardian: Guardian
    events: LaunchEvents
    folders: KeptFolders
    discovery: Discovery

    def run_all(self, warm: WarmStart | None) -> Outcome:
        """Runs all tasks, again and again where that is called for; returns the last outcome."""
        restarts, num_workers = Restarts(), self.options.workers
        while True:
            num_workers = self.discovery.wait(num_workers, lambda: self.caught.ending is not None)
            if not num_workers:
                outcome = Outcome(ends=(), signum=self.caught.ending, restart=restarts.count)
                self.events.end(outcome.exit_code)
                return outcome
            started_s, num_forked = time.monotonic(), warm.num_started if warm else 0
            outcome = self.run(restarts.count, num_workers, warm)
            after = restarts.next(
                outcome.ends,
                ran_s=time.monotonic() - started_s,
                max_restarts=self.options.max_restarts,
                were_asked=outcome.were_asked,
            )
            if outcome.signum is not None:
                after = None
            num_workers = workers_after(self.options, num_workers, outcome.ends)
            _tell_end(outcome, restarts, after, self.options, self.events, num_workers=num_workers)
            if after is None:
                return outcome
            was_forked = warm is not None and warm.num_started > num_forked
            if was_forked and outcome.cause and outcome.cause.returncode not in _FROM_OUTSIDE:
                warm = None  # a program that fails by itself may fail for having been forked
            restarts = after

    def is_notice_due(self, num_workers: int, ran_s: float) -> bool:
        """Whether tasks are to leave so that more workers can start."""
        after_s = notice_after_s(self.options, num_workers)
        if after_s is None or ran_s < after_s:
            return False
        can_run = self.discovery.num_workers()
        return can_run is None or can_run > num_workers

    def run(self, restart: int, num_workers: int, warm: WarmStart | None) -> Outcome:
        """Runs all tasks once, from their start to the end of the last one."""
        options = self.options.with_workers(num_workers)
        plans = plan_tasks(
            options,
            self.command,
            ports=free_ports(len(options.task_types)),
            gpus=self.gpus,
            base=self.base,
            restart=restart,
            folders=self.folders,
        )
        if self.finish is not None:
            plans = tuple(self.finish(plan) for plan in plans)
        ends, were_asked = run_group(
            plans,
            options,
            self.base,
            screen=Screen([plan.name for plan in plans]),
            caught=self.caught,
            guardian=self.guardian,
            events=self.events,
            warm=warm,
            is_notice_due=functools.partial(self.is_notice_due, num_workers),
        )
        return Outcome(ends=ends, signum=self.caught.ending, restart=restart, were_asked=were_asked)


def _tell_end(
    outcome: Outcome,
    before: Restarts,
    after: Restarts | None,
    options: LaunchOptions,
    events: LaunchEvents,
    *,
    num_workers: int,
) -> None:
    """Says how all ended and whether they are started again, here and in the run's folder."""
    screen = Screen([end.name for end in outcome.ends])
    cause, signum = outcome.cause, outcome.signum
    if cause is not None and signum not in cause.signals:
        if have_saved_and_left(outcome.ends):
            screen.say(notice_report(outcome.ends, after))
        else:
            screen.say(failure_report(cause, outcome.ends, log_dir=options.log_dir))
    if signum is not None:
        screen.say(signal_report(signum, outcome.ends))
    elif cause is not None:
        events.failure(cause)
    if after is None:
        events.end(outcome.exit_code)
        return
    screen.say(restart_report(before, after, options.max_restarts))
    if options.min_workers is not None or options.max_workers is not None:
        screen.say([f"There are {num_workers} of {options.full_workers} workers now."])
    events.restart(after.count, cause)
