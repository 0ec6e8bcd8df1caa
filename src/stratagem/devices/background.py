"""Programs with sums between processes that run beside later programs, which do not need them.

XLA's CPU client runs the programs that one thread has started one after the other, and one that
waits for a message takes a thread of its pool. So each is started in a thread of its own, and the
pool has two threads at least. One of several devices of a process would wait for the others, too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from stratagem import environment
from stratagem.devices.finding import num_cpu_devices
from stratagem.devices.mesh import Topology
from stratagem.group.current import current_group

# Threads in the pool of XLA's CPU client, by default as many as there are cores.
_NUM_THREADS = "NPROC"
_PATIENCE_S = 0.01


@dataclasses.dataclass
class InFlightProgram:
    """A program in flight: its step number, its name, and outputs that no later program donates."""

    number: int = 0
    name: str = ""
    token: Any = None


# Programs that run beside others and were not waited for, oldest first.
background_flights: deque[InFlightProgram] = deque()


def can_run_beside(topology: Topology) -> bool:
    """Returns True if a program with sums between the replicas can run beside their steps."""
    return (
        topology.platform == "cpu"
        and topology.spans_processes
        and topology.groups is None
        and topology.num_local_replicas == 1
    )


def start_beside(name: str, start: Callable[[], tuple[Any, Any]]) -> Any:
    """Starts a program of all processes that may run beside later ones; returns its outputs.

    `start` returns the outputs, and some of them that no later program donates. The program takes
    the token of the last one of `background_flights`, so that sums have one order. Raises as
    `run_together` if a process is lost while the program starts.
    """
    started: Future[tuple[Any, Any]] = Future()
    threading.Thread(
        target=_complete, args=(started, start), name="stratagem-background", daemon=True
    ).start()
    group = current_group()
    number = 0 if group is None else group.num_steps
    with contextlib.suppress(TimeoutError):
        started.exception(_PATIENCE_S)
    if group is not None:
        group.wait_for_step(number, name, started.done)  # a small program may run in its thread
    outputs, token = started.result()
    background_flights.append(InFlightProgram(number, name, token))
    return outputs


def _complete(started: Future[Any], start: Callable[[], Any]) -> None:
    try:
        started.set_result(start())
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        started.set_exception(error)


def add_thread_for_background() -> None:
    """Gives XLA's CPU client two threads on one core. Call before JAX starts."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    if num_cpu_devices() == 1 and len(cores) == 1:
        environment.set_defaults({_NUM_THREADS: "2"})
