"""Ours: a cluster of parameter servers whose processes are killed while it works."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import stratagem as sg  # isort: skip - before keras, because it selects the JAX backend

import keras
import numpy as np

from benchmarks.workers.parameter_server_work import ClusterOptions
from benchmarks.workers.protocol import serve_questions
from benchmarks.workers.served_models import make_mlp
from benchmarks.workloads import WORKLOADS

__all__ = ["prepare"]

# A function that computes little, for which one core is enough for all workers.
_WORK_S = 0.01
_IN_FLIGHT_PER_WORKER = 4


def prepare() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Starts the cluster; answers what became of work while processes were killed."""
    options = ClusterOptions(**json.loads(sys.argv[1]))
    strategy = sg.ParameterServerStrategy(
        num_workers=options.num_workers, num_servers=options.num_servers
    )
    coordinator = sg.coordinator.ClusterCoordinator(strategy)

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        run = _run_functions if question["kind"] == "workers" else _fit
        return run(strategy, coordinator, **question["options"])

    return answer


class _Killer:
    """Kills processes by chance, again and again, in a thread of its own.

    Args:
        pids: returns the ids of those that run.
        after_s: how long to wait at first.
        every_s: and then each time.
        count: how many to kill.
    """

    def __init__(
        self, pids: Callable[[], Sequence[int]], after_s: float, every_s: float, count: int
    ) -> None:
        self.kills: list[tuple[float, int, int]] = []  # when, which one, its id
        self.is_over = threading.Event()
        self._arguments = pids, after_s, every_s, count
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        pids, after_s, every_s, count = self._arguments
        choice = random.Random(0)
        time.sleep(after_s)
        next_s = time.monotonic()
        while len(self.kills) < count:
            running = list(enumerate(pids()))
            index, pid = choice.choice(running)
            with contextlib.suppress(ProcessLookupError):  # it has not returned yet: another one
                at_s = time.time()
                os.kill(pid, signal.SIGKILL)
                self.kills.append((at_s, index, pid))
                next_s += every_s
            time.sleep(max(0.001, next_s - time.monotonic()))
        self.is_over.set()


def _run_functions(
    strategy: Any, coordinator: Any, *, before_s: float, every_s: float, count: int, after_s: float
) -> dict[str, Any]:
    """Runs small functions while workers are killed."""
    folder = tempfile.mkdtemp()
    with strategy.scope():
        counted = keras.metrics.Sum()

    def work(number: int) -> tuple[int, int, int, float, float]:
        with open(f"{folder}/{os.getpid()}", "a") as file:
            file.write(f"{number}\n")
        counted.update_state(float(number % 7))
        time.sleep(_WORK_S)
        return (
            number * number,
            sg.coordinator.get_current_worker_index(),
            os.getpid(),
            time.time(),
            time.process_time(),
        )

    free = threading.Semaphore(_IN_FLIGHT_PER_WORKER * coordinator.num_workers)
    workers = range(coordinator.num_workers)
    warm = [coordinator.schedule(work, args=(0,), worker=one) for one in workers]
    coordinator.fetch(warm)
    begin_s = time.time()
    values: list[Any] = []
    killer = _Killer(lambda: coordinator.workers.pids, before_s, every_s, count)
    end_s = None
    while end_s is None or time.time() < end_s:
        if end_s is None and killer.is_over.is_set():
            end_s = time.time() + every_s + after_s
        free.acquire()
        values.append(coordinator.schedule(work, args=(len(values),)))
        values[-1].observe(lambda value: free.release())
    coordinator.join()
    results = coordinator.fetch(values)
    runs = collections.Counter(
        int(line) for path in Path(folder).iterdir() for line in path.read_text().split()
    )
    runs[0] -= len(warm)
    return {
        "begin_s": begin_s,
        "kills": killer.kills,
        "ends": [end_s for *_, end_s, _ in results],
        **_returns(killer.kills, results),
        "num_functions": len(values),
        "num_wrong": sum(one[0] != number**2 for number, one in enumerate(results)),
        "num_never_run": sum(runs[number] < 1 for number in range(len(values))),
        "num_runs": sum(runs.values()),
        "counted": float(np.asarray(counted.result())),
        "to_count": float(sum(number % 7 for number in range(len(values)))),
    }


def _returns(
    kills: list[tuple[float, int, int]], results: list[tuple[int, int, int, float, float]]
) -> dict[str, list[float]]:
    """How long after each kill the worker had ended a function again, and at what cost."""
    returns: list[float] = []
    cpu_s: list[float] = []
    for at_s, worker, pid in kills:
        later = [
            (end_s, used_s)
            for _, one, own, end_s, used_s in results
            if one == worker and own != pid and end_s > at_s
        ]
        end_s, used_s = min(later, default=(float("inf"), float("inf")))
        returns.append(end_s - at_s)
        cpu_s.append(used_s)
    return {"returns": returns, "cpu_s": cpu_s}


class _Times(keras.callbacks.Callback):
    """Notes when each step was known to be done, and ends training after the last kill."""

    def __init__(self, killer: _Killer, after_s: float) -> None:
        super().__init__()
        self.times_s: list[float] = []
        self._killer = killer
        self._after_s = after_s

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times_s.append(time.time())
        kills = self._killer.kills
        is_over = self._killer.is_over.is_set()
        if is_over and self.times_s[-1] > kills[-1][0] + self._after_s:
            model: Any = self.model
            model.stop_training = True


def _fit(
    strategy: Any, coordinator: Any, *, before_s: float, every_s: float, count: int, after_s: float
) -> dict[str, Any]:
    """Trains while servers are killed."""
    x, y = WORKLOADS["mlp"].arrays()
    model = make_mlp(strategy)
    model.fit(x, y, batch_size=128, epochs=1, verbose=0)
    client = strategy.placement.remote.variables.client
    before = [told["version"] for told in client.describe().values()]
    servers = strategy.cluster.servers
    killer = _Killer(lambda: servers.pids, before_s, every_s, count)
    times = _Times(killer, after_s)
    begin_s = time.time()
    model.fit(x, y, batch_size=128, epochs=10**6, verbose=0, callbacks=[times])
    after = [told["version"] for told in client.describe().values()]
    num_steps = len(times.times_s)
    made = [later - earlier for earlier, later in zip(before, after, strict=True)]
    return {
        "begin_s": begin_s,
        "kills": killer.kills,
        "ends": times.times_s,
        "num_steps": num_steps,
        "lost": [num_steps - one for one in made],
        "told_lost": coordinator.num_lost_updates,
        "loss": float(model.evaluate(x, y, verbose=0)),
    }


if __name__ == "__main__":
    serve_questions(prepare)
