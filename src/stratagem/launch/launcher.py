"""Starts a plan, again after a failure where that is allowed, and says what has happened."""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence

from stratagem import environment
from stratagem.accelerators import local_gpus
from stratagem.launch.devices import uses_gpus
from stratagem.launch.ends import TaskEnd, exit_code
from stratagem.launch.events import LaunchEvents
from stratagem.launch.group import run_group
from stratagem.launch.guardian import Guardian
from stratagem.launch.options import LaunchOptions
from stratagem.launch.output import Screen
from stratagem.launch.plan import TaskPlan, plan_tasks
from stratagem.launch.policy import cause_of_failure, have_saved_and_left
from stratagem.launch.ports import free_ports
from stratagem.launch.report import (
    failure_report,
    notice_report,
    restart_report,
    signal_report,
)
from stratagem.launch.restarts import Restarts
from stratagem.launch.signals import CaughtSignals

__all__ = ["Outcome", "launch"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the tasks of the last start ended.

    Args:
        ends: the end of each.
        signum: the signal to the launcher that ended them; None without one.
        restart: how often they were started again.
    """

    ends: tuple[TaskEnd, ...]
    signum: signal.Signals | None
    restart: int

    @property
    def cause(self) -> TaskEnd | None:
        """The task that failed first; None if none failed."""
        return cause_of_failure(self.ends)

    @property
    def exit_code(self) -> int:
        """That of the task that failed first, as a shell reports it; 0 if none failed."""
        return 0 if self.cause is None else exit_code(self.cause.returncode)


def launch(
    command: Sequence[str],
    options: LaunchOptions,
    *,
    finish: Callable[[TaskPlan], TaskPlan] | None = None,
) -> Outcome:
    """Runs a command as every task of a cluster on this machine.

    Args:
        command: the program and its arguments.
        options: which tasks there are, what each gets, and how they end.
        finish: completes the plan of each task before it starts.

    Returns:
        How they ended.

    Raises:
        ValueError: fewer GPUs than asked for.
        OSError: a process cannot be started, or a file not be written.
    """
    base = environment.snapshot()
    gpus = local_gpus() if uses_gpus(base) else ()
    with CaughtSignals() as caught, Guardian() as guardian, LaunchEvents(options) as events:
        restarts = Restarts()
        while True:
            ports = free_ports(len(options.task_types))
            plans = plan_tasks(
                options, command, ports=ports, gpus=gpus, base=base, restart=restarts.count
            )
            if finish is not None:
                plans = tuple(finish(plan) for plan in plans)
            screen = Screen([plan.name for plan in plans])
            started_s = time.monotonic()
            ends = run_group(
                plans,
                options,
                base,
                screen=screen,
                caught=caught,
                guardian=guardian,
                events=events,
            )
            outcome = Outcome(ends=ends, signum=caught.ending, restart=restarts.count)
            ran_s = time.monotonic() - started_s
            after = restarts.next(ends, ran_s=ran_s, max_restarts=options.max_restarts)
            _tell_end(outcome, after, options, screen)
            if outcome.cause is not None and outcome.signum is None:
                events.failure(outcome.cause)
            if outcome.cause is None or after is None or outcome.signum is not None:
                events.end(outcome.exit_code)
                return outcome
            screen.say(restart_report(restarts, after, options.max_restarts))
            events.restart(after.count, outcome.cause)
            restarts = after


def _tell_end(
    outcome: Outcome, after: Restarts | None, options: LaunchOptions, screen: Screen
) -> None:
    cause, signum = outcome.cause, outcome.signum
    if cause is not None and signum not in cause.signals:
        if have_saved_and_left(outcome.ends):
            screen.say(notice_report(outcome.ends, after))
        else:
            screen.say(failure_report(cause, outcome.ends, log_dir=options.log_dir))
    if signum is not None:
        screen.say(signal_report(signum, outcome.ends))
