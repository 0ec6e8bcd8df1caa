"""Starts a plan, again after a failure where that is allowed, and says what has happened."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Callable, Sequence

from stratagem import environment
from stratagem.accelerators import local_gpus
from stratagem.launch.devices import uses_gpus
from stratagem.launch.ends import TaskEnd, exit_code
from stratagem.launch.group import run_group
from stratagem.launch.guardian import Guardian
from stratagem.launch.options import LaunchOptions
from stratagem.launch.output import Screen
from stratagem.launch.plan import TaskPlan, plan_tasks
from stratagem.launch.policy import cause_of_failure
from stratagem.launch.ports import free_ports
from stratagem.launch.report import failure_report, restart_report, signal_report
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
    with CaughtSignals() as caught, Guardian() as guardian:
        restart = 0
        while True:
            ports = free_ports(len(options.task_types))
            plans = plan_tasks(options, command, ports=ports, gpus=gpus, base=base, restart=restart)
            if finish is not None:
                plans = tuple(finish(plan) for plan in plans)
            screen = Screen([plan.name for plan in plans])
            ends = run_group(plans, options, base, screen=screen, caught=caught, guardian=guardian)
            outcome = Outcome(ends=ends, signum=caught.ending, restart=restart)
            if not _goes_on(outcome, options, screen):
                return outcome
            restart += 1


def _goes_on(outcome: Outcome, options: LaunchOptions, screen: Screen) -> bool:
    """Reports how it ended, and says whether all is to be started again."""
    cause, signum = outcome.cause, outcome.signum
    if cause is not None and signum not in cause.signals:
        screen.say(failure_report(cause, outcome.ends, log_dir=options.log_dir))
    if signum is not None:
        screen.say(signal_report(signum, outcome.ends))
    if cause is None or signum is not None or outcome.restart >= options.max_restarts:
        return False
    screen.say(restart_report(outcome.restart + 1, options.max_restarts))
    return True
