"""Launcher: runs the tasks of a job, restarts them if allowed, and reports how they ended."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import signal
import time
from collections.abc import Callable, Sequence

from stratagem import environment
from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.addresses import free_ports, split_address
from stratagem.cluster.preemption.configuration import EXIT_CODE
from stratagem.group.authentication.secret import Credentials, with_ray_token, with_secret
from stratagem.launch.options import Discovery, ElasticConfig, LaunchOptions
from stratagem.launch.plan import (
    INPUT,
    LaunchFolders,
    Node,
    TaskPlan,
    make_launch_folders,
    plan_tasks,
    uses_gpus,
)
from stratagem.launch.prefork.warm_start import WarmStart, can_fork
from stratagem.launch.restart.policy import (
    RestartCount,
    cause_of_failure,
    failed_by_themselves,
    have_saved_and_left,
    have_survivors,
)
from stratagem.launch.restart.report import (
    CaughtSignals,
    LaunchEvents,
    SlowTasks,
    failure_report,
    notice_report,
    restart_report,
    signal_report,
)
from stratagem.launch.restart.task_group import LaunchContext, TaskGroup
from stratagem.launch.tasks.exit_status import ExitStatus, exit_code
from stratagem.launch.tasks.guardian import Guardian
from stratagem.launch.tasks.output import Screen
from stratagem.resources import remove_abandoned_folders

# Number of workers in the next start of a job.


def workers_after(options: LaunchOptions, num_workers: int, statuses: Sequence[ExitStatus]) -> int:
    """Returns the number of workers to start after a start with `num_workers` has ended.

    Workers that failed by themselves are left out, down to `min_workers`. All workers start if the
    tasks saved and exited, or if there is no `min_workers`.
    """
    failed = failed_by_themselves(statuses)
    if options.min_workers is None or not failed or have_saved_and_left(statuses):
        return options.full_workers
    num_lost = sum(status.name.startswith("worker ") for status in failed)
    return min(num_workers, max(options.min_workers, num_workers - num_lost))


def notice_after_s(options: LaunchOptions, num_workers: int) -> float | None:
    """Returns when, in seconds, tasks should save and exit to add workers; None if all run."""
    return options.rejoin_after_s if num_workers < options.full_workers else None


# Exit of a task that was ended from outside, or that saved and exited.
_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM, EXIT_CODE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a launch: exit statuses of the last start, and their circumstances.

    `signum` is the signal to the launcher that ended the tasks, if any; `were_asked` means that the
    launcher asked the tasks to exit, so that more can start. With `may_survive`, workers that
    others have survived did not fail.
    """

    statuses: tuple[ExitStatus, ...]
    signum: signal.Signals | None
    were_asked: bool = False
    may_survive: bool = False

    @property
    def counted(self) -> tuple[ExitStatus, ...]:
        """Statuses without those of workers that others have survived."""
        trainers = [status for status in self.statuses if status.trains]
        if not (self.may_survive and have_survivors(trainers)):
            return self.statuses
        return tuple(one for one in self.statuses if not (one.trains and one.failed))

    @property
    def cause(self) -> ExitStatus | None:
        """The task that failed first; None if none failed."""
        return cause_of_failure(self.counted)

    @property
    def exit_code(self) -> int:
        """Exit code of the task that failed first or exited when asked, as in a shell; else 0.

        If a signal to the launcher ended any task, or came before the start of any, it is the
        signal's: the others may have failed because of that task.
        """
        if self.signum is not None:
            by_signal = (-self.signum, exit_code(-self.signum))
            if not self.statuses or any(one.returncode in by_signal for one in self.statuses):
                return exit_code(-self.signum)
        left = [one for one in self.statuses if self.were_asked and one.trains and one.returncode]
        cause = self.cause or next(iter(left), None)
        return 0 if cause is None else exit_code(cause.returncode)


def launch(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    finish: Callable[[TaskPlan], TaskPlan] | None = None,
    elastic: ElasticConfig | None = None,
    kills_interrupted: bool = False,
    node: Node | None = None,
) -> Outcome:
    """Runs a command as every task of a cluster on this machine, or as those of this node of many.

    `finish` completes the plan of each task before it starts; `elastic` replaces `min_workers` and
    `max_workers` of the options. `kills_interrupted` kills tasks that still run `grace_s` after a
    signal to end. Raises UnavailableError if too few workers could run for longer than the limit,
    ValueError with fewer GPUs than requested, OSError for a failed start or write.
    """
    if elastic is not None:
        least, most = elastic.min_workers, elastic.max_workers
        options = dataclasses.replace(options, min_workers=least, max_workers=most)
    else:
        elastic = ElasticConfig(options.min_workers or 1)
    base = environment.snapshot()
    if node is None:
        base = with_secret(base)
        if len(options.task_types) > 1:  # the leader of a cluster with servers starts Ray's head
            base = with_ray_token(base)
    else:  # an error of one launcher, and not of each task
        Credentials.find("This launcher", [split_address(node.coordinator)[0]])
    with (
        CaughtSignals() as caught,
        contextlib.ExitStack() as stack,
        Guardian() as guardian,
        LaunchEvents(options, node) as events,
        make_launch_folders(options, base) as folders,
        WarmStart(base) as warm_start,
    ):
        stack.callback(remove_abandoned_folders)  # after the guardian has killed what is left
        is_warm = options.max_restarts > 0 and not options.cold_restarts
        warm = warm_start if is_warm and can_fork(command, base) else None
        context = LaunchContext(
            options=options,
            base=base,
            caught=caught,
            guardian=guardian,
            events=events,
            kills_interrupted=kills_interrupted,
            slow=None if options.run_dir is None else SlowTasks(options.run_dir),
        )
        discovery = Discovery(elastic, options.full_workers)
        return _Job(command, context, finish, folders, discovery, node).run(warm)


@dataclasses.dataclass(frozen=True)
class _Job:
    """All starts of one launch."""

    command: Sequence[str]
    context: LaunchContext
    finish: Callable[[TaskPlan], TaskPlan] | None
    folders: LaunchFolders
    discovery: Discovery
    node: Node | None

    def run(self, warm: WarmStart | None) -> Outcome:
        """Runs all tasks, restarts them as often as allowed, and returns the last outcome."""
        context, options, caught = self.context, self.context.options, self.context.caught
        gpus = local_gpus() if uses_gpus(context.base) else ()
        count, num_workers = RestartCount(), options.workers
        while True:
            num_workers = self.discovery.wait(num_workers, lambda: caught.ending is not None)
            if not num_workers:
                outcome = Outcome(statuses=(), signum=caught.ending)
                context.events.end(outcome.exit_code)
                return outcome
            started_s, num_forked = time.monotonic(), warm.num_started if warm else 0
            outcome = self.run_once(count.count, num_workers, gpus, warm)
            after = count.next(
                outcome.counted,
                ran_s=time.monotonic() - started_s,
                max_restarts=options.max_restarts,
                max_preemptions=options.max_preemptions,
                were_asked=outcome.were_asked,
            )
            if outcome.signum is not None:
                after = None
            num_workers = workers_after(options, num_workers, outcome.statuses)
            _report(outcome, count, after, context, num_workers)
            if after is None:
                return outcome
            was_forked = warm is not None and warm.num_started > num_forked
            if was_forked and outcome.cause and outcome.cause.returncode not in _FROM_OUTSIDE:
                warm = None  # the program may have failed because it was forked
            count = after

    def is_notice_due(self, num_workers: int, ran_s: float) -> bool:
        """Returns True if the tasks should exit so that more workers can start."""
        after_s = notice_after_s(self.context.options, num_workers)
        if after_s is None or ran_s < after_s:
            return False
        can_run = self.discovery.num_workers()
        return can_run is None or can_run > num_workers

    def run_once(
        self, restart: int, num_workers: int, gpus: Sequence[str], warm: WarmStart | None
    ) -> Outcome:
        """Runs all tasks once, until the last one has ended."""
        context = self.context
        options = context.options.with_workers(num_workers)
        plans = plan_tasks(
            options,
            self.command,
            ports=free_ports(len(options.task_types)),
            gpus=gpus,
            base=context.base,
            restart=restart,
            folders=self.folders,
            node=self.node,
        )
        if self.finish is not None:
            plans = tuple(plan if plan.task_type == INPUT else self.finish(plan) for plan in plans)
        if context.slow is not None:
            context.slow.begin(time.monotonic())
        with TaskGroup(context, Screen([plan.name for plan in plans]), warm) as group:
            group.run(plans, functools.partial(self.is_notice_due, num_workers))
            return Outcome(
                statuses=group.statuses,
                signum=context.caught.ending,
                were_asked=group.were_asked,
                may_survive=options.survivors,
            )


def _report(
    outcome: Outcome,
    before: RestartCount,
    after: RestartCount | None,
    context: LaunchContext,
    num_workers: int,
) -> None:
    """Reports the end of a start and a restart, on the screen and in the run's folder."""
    statuses, options, events = outcome.statuses, context.options, context.events
    screen = Screen([status.name for status in statuses])
    cause, signum = outcome.cause, outcome.signum
    if cause is not None and signum not in cause.signals:
        if have_saved_and_left(statuses):
            screen.say(notice_report(statuses, before, after, options.max_preemptions))
        else:
            screen.say(failure_report(cause, statuses, log_dir=options.log_dir))
    if signum is not None:
        screen.say(signal_report(signum, statuses))
    elif cause is not None:
        events.failure(cause)
    if after is None:
        events.end(outcome.exit_code)
        return
    screen.say(restart_report(before, after, options))
    if options.min_workers is not None or options.max_workers is not None:
        screen.say([f"There are {num_workers} of {options.full_workers} workers now."])
    events.restart(after.count, cause)
