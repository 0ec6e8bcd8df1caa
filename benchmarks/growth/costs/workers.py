"""Control messages between real processes on this machine, which do not load a model."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import socket
import time
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.growth.costs.serving import Answer, serve_costs
from stratagem.checkpoint.preemption import AgreedStep, PreemptionAction
from stratagem.cluster.preemption.configuration import TerminationConfig
from stratagem.errors import UnavailableError
from stratagem.group.current import Identity
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits

__all__ = ["measure"]

_LIMITS = GroupLimits(join_s=300, peer_s=60, stuck_s=300, barrier_s=300)
_LIMIT_S = 300.0
_NUM_BARRIERS, _NUM_SMALLEST_BARRIERS = 50, 2
_STEP_S = 0.005


@dataclasses.dataclass(frozen=True)
class _Place:
    """One process of a group."""

    index: int
    count: int
    port: int
    num_barriers: int

    def join(self) -> Group:
        """Joins the group."""
        labels = tuple(f"worker {index} (127.0.0.1:{self.port})" for index in range(self.count))
        return Group(Identity(self.index, labels, "127.0.0.1", self.port), _LIMITS)


def measure(size: int, *, is_smallest: bool) -> Answer:
    """Returns how long a group of `size` processes takes, until the last of them is through."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.growth.costs.workers"])
    port, num_barriers = _free_port(), _NUM_SMALLEST_BARRIERS if is_smallest else _NUM_BARRIERS
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for index in range(size):
            here, there = context.Pipe()
            place = _Place(index, size, port, num_barriers)
            process = context.Process(target=_run, args=(place, there), daemon=True)
            process.start()
            there.close()
            processes.append(process)
            pipes.append(here)
        for pipe in pipes:
            _receive(pipe)
        begun_s = time.monotonic()
        for pipe in pipes:
            pipe.send("begin")
        told = [_receive(pipe) for pipe in pipes]
        ended_s = [_receive(pipe) for pipe in pipes[:-1]]
    finally:
        for process in processes:
            process.kill()
            process.join()
    return {
        "ours": {
            "join_s": max(one["joined_s"] for one in told) - begun_s,
            "barrier_s": max(one["barriers_s"] for one in told) / num_barriers,
            "agreement_s": max(one["agreed_s"] for one in told) - told[0]["noticed_s"],
            "verdict_s": max(ended_s) - told[-1]["killed_s"],
        }
    }


def _run(place: _Place, pipe: Connection) -> None:
    """Goes through everything that the benchmark measures, in one process of the group."""
    pipe.send("ready")
    _receive(pipe)
    group = place.join()
    told = {"joined_s": time.monotonic()}
    group.exchange("begin", None)
    begun_s = time.monotonic()
    for number in range(place.num_barriers):
        group.exchange(f"barrier {number}", None)
    told["barriers_s"] = time.monotonic() - begun_s
    is_noticed = place.index == 0
    config = TerminationConfig(termination_watcher_fn=lambda: is_noticed, grace_period=0.0)
    steps = AgreedStep(config, group)
    group.exchange("the notice", None)
    told["noticed_s"] = time.monotonic()
    steps.start()
    while steps.next_step() is not PreemptionAction.EXIT:
        time.sleep(_STEP_S)
    told["agreed_s"] = time.monotonic()
    steps.stop()
    group.exchange("the loss", None)
    told["killed_s"] = time.monotonic()
    pipe.send(told)
    if place.index == place.count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        group.exchange("what never comes", None)
    except UnavailableError:
        pipe.send(time.monotonic())


def _receive(pipe: Connection) -> Any:
    if not pipe.poll(_LIMIT_S):
        raise TimeoutError(f"no answer of a process within {_LIMIT_S:g} s")
    return pipe.recv()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve_costs(measure)
