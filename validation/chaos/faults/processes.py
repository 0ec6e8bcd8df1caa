"""Signals to any process of a job."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene

__all__ = ["KINDS", "choose", "send"]

# What ends a job for good when it gets a signal, for the user has asked for it.
_HEADS = ("launcher", "client", "coordinator")
# Nothing but the user watches these, so a stop of theirs ends at some time.
_UNWATCHED = ("launcher", "client", "coordinator", "function", "supervisor")
_UNWATCHED_STOP_S = 6.0
# Around the limit after which the others give a process up.
_STOP_S = (0.5, 7.0)


def choose(scene: Scene) -> tuple[str, int]:
    """Draws a process: first its kind, so that many workers do not shield the only launcher."""
    processes = scene.job.processes()
    if not processes:
        raise NotHereError("no process is left")
    kinds = sorted({name.rstrip(" 0123456789") for name in processes})
    kind = scene.chance.choice(kinds)
    name = scene.chance.choice(sorted(n for n in processes if n.rstrip(" 0123456789") == kind))
    return name, processes[name]


def send(pid: int, signum: int) -> None:
    """Sends a signal, unless the process has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _signal(signum: signal.Signals, scene: Scene) -> Fault:
    name, pid = choose(scene)
    send(pid, signum)
    words = {signal.SIGINT: "SIGINT|KeyboardInterrupt", signal.SIGTERM: "SIGTERM"}
    return Fault(
        kind=signum.name, where=name, ends=name in _HEADS, causes=words.get(signum, "SIGKILL")
    )


def _stop(is_brief: bool, scene: Scene) -> Fault:
    name, pid = choose(scene)
    lasts_s = scene.chance.uniform(*_STOP_S) if is_brief else None
    if name in _UNWATCHED and not is_brief:
        lasts_s = _UNWATCHED_STOP_S
    send(pid, signal.SIGSTOP)
    return Fault(
        kind="SIGSTOP for a while" if is_brief else "SIGSTOP",
        where=name,
        causes="has not answered|no progress|SIGKILL",
        lift=partial(send, pid, signal.SIGCONT),
        lasts_s=lasts_s,
    )


KINDS = (
    *(
        FaultKind(signum.name, partial(_signal, signum))
        for signum in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
    ),
    FaultKind("SIGSTOP", partial(_stop, False)),
    FaultKind("SIGSTOP for a while", partial(_stop, True)),
)
