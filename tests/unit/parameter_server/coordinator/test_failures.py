"""Workers, servers and coordinators that are killed while they work."""

from __future__ import annotations

import collections
import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.launch.remote.living import descendants, name_of, wait_for_end
from tests.unit.launch.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Parameter servers restarted:RuntimeWarning"),
]

_LIMIT_S = 240.0
# They hold nothing, and end by themselves when they notice that the rest of Ray has gone.
_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


@pytest.fixture(scope="module")
def strategy(ray_cluster: Any) -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=3, num_servers=2) as made:
        ClusterCoordinator(made)  # starts the workers
        yield made


def test_no_function_is_lost_while_workers_are_killed(strategy, tmp_path) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counted = keras.metrics.Sum()
        variable = sg.Variable(np.zeros(3, "float32"))

    def work(number: int) -> tuple[int, int, int]:
        with (tmp_path / str(os.getpid())).open("a") as file:
            file.write(f"{number}\n")
        counted.update_state(float(number % 7))
        time.sleep(0.005)
        value = number**2 + int(variable.value[0])
        return value, sg.coordinator.get_current_worker_index(), os.getpid()

    choice, killed, values = random.Random(1), [], []
    next_s, end_s = time.monotonic() + 2.0, time.monotonic() + 22.0
    for number in itertools.count():
        if time.monotonic() > end_s:
            break
        if time.monotonic() > next_s:
            worker = choice.randrange(3)
            with contextlib.suppress(ProcessLookupError):  # it has not returned yet
                os.kill(coordinator.workers.pids[worker], signal.SIGKILL)
                killed.append(coordinator.workers.pids[worker])
                next_s += 2.0
        values.append(coordinator.schedule(work, args=(number,)))
        if number >= 20:
            values[number - 20].fetch()
    coordinator.join()
    results = coordinator.fetch(values)
    assert [value for value, _, _ in results] == [number**2 for number in range(len(values))]
    assert float(counted.result()) == sum(number % 7 for number in range(len(values)))
    runs = collections.Counter(
        int(line) for path in tmp_path.iterdir() for line in path.read_text().split()
    )
    assert set(runs) == set(range(len(values)))
    # What ran again was at most what a killed worker ran, or had been sent.
    assert sum(runs.values()) - len(values) <= 2 * len(killed)
    assert len(set(killed)) == len(killed) >= 8
    # All work again, in processes that nobody has killed.
    last = [coordinator.schedule(work, args=(0,), worker=worker) for worker in range(3)]
    assert not {pid for _, _, pid in coordinator.fetch(last)} & set(killed)


class _KillsServer(keras.callbacks.Callback):
    """Kills a server after some steps, and notes when steps are done."""

    def __init__(self, strategy: Any) -> None:
        super().__init__()
        self._strategy = strategy
        self.times_s: list[float] = []
        self.journaled: int | None = None
        self.version = 0
        self.killed_s = 0.0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.times_s.append(time.monotonic())
        if len(self.times_s) == 100:
            state = self._strategy.placement.remote.variables.client.describe()[1]
            self.journaled, self.version = state["journaled_version"], state["version"]
            self.killed_s = time.monotonic()
            os.kill(self._strategy.cluster.servers.pids[1], signal.SIGKILL)


def test_training_goes_on_after_a_server_was_killed(strategy) -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(64, 6)).astype("float32")
    y = x @ rng.normal(size=(6, 2)).astype("float32")
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
    first = model.evaluate(x, y, verbose=0)
    killer = _KillsServer(strategy)
    model.fit(x, y, batch_size=4, epochs=40, verbose=0, callbacks=[killer])
    assert len(killer.times_s) == 640
    near = [one for one in killer.times_s if one > killer.killed_s - 1.0]
    assert max(later - one for one, later in itertools.pairwise(near)) < 10.0
    servers = strategy.placement.remote.variables.client.describe()
    restored = servers[1]["restored_version"]
    assert killer.journaled is not None
    assert restored >= killer.journaled  # what was on the disk is there
    lost = 640 - servers[1]["version"]
    assert servers[0]["version"] == 640
    assert lost >= 0
    # Each worker tells what it has seen; none has seen more than there was.
    counted = ClusterCoordinator(strategy).num_lost_updates
    assert lost - 3 <= counted <= lost
    assert model.evaluate(x, y, verbose=0) < first


def test_function_that_never_ends_does_not_keep_a_cluster_open(ray_cluster) -> None:
    strategy = sg.ParameterServerStrategy(num_workers=1, num_servers=1)
    coordinator = ClusterCoordinator(strategy)
    value = coordinator.schedule(time.sleep, args=(10**6,))
    coordinator.schedule(time.sleep, args=(10**6,))
    until(lambda: coordinator._queue.counts["running"])
    pids = [*coordinator.workers.pids, *strategy.cluster.servers.pids]
    begun_s = time.monotonic()
    strategy.close()
    assert time.monotonic() - begun_s < 20.0
    with pytest.raises(sg.errors.CancelledError, match="was cancelled before it finished"):
        value.fetch()
    assert not wait_for_end(pids)


@contextlib.contextmanager
def _coordinator(folder: Path) -> Iterator[tuple[subprocess.Popen[str], Iterator[list[str]]]]:
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.unit.parameter_server.killed_coordinator", str(folder)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=Path(__file__).parents[4],
        )
        assert process.stdout is not None
        watch = threading.Timer(_LIMIT_S, process.kill)
        watch.start()
        try:
            yield process, (line.split() for line in process.stdout)
        finally:
            watch.cancel()
            watch.join()
            process.kill()
            process.wait()
            process.stdout.close()


def _next(lines: Iterator[list[str]], what: str) -> int:
    return next(int(line[1]) for line in lines if line and line[0] == what)


def test_coordinator_that_was_killed_goes_on_and_leaves_nothing(tmp_path) -> None:
    with _coordinator(tmp_path) as (process, lines):
        assert [_next(lines, "restored") for _ in range(2)] == [0, 0]
        journaled, iterations = 0, 0
        while journaled < 100:  # several entries of the journals
            journaled, iterations = _next(lines, "journaled"), _next(lines, "iterations")
        started = {pid: name for pid in descendants(process.pid) if (name := name_of(pid)) != ""}
    # Its servers may still live: those that are started now wait for their end.
    with _coordinator(tmp_path) as (process, lines):
        restored = [_next(lines, "restored") for _ in range(2)]
        assert journaled <= min(restored)
        assert journaled < iterations
        assert _next(lines, "iterations") > min(restored)
        ours = {pid for pid, name in started.items() if not name.startswith(_AGENTS)}
        assert len(ours) >= 4  # the process to fork from, and one for each task
        assert not wait_for_end(ours)
        again = {pid for pid in descendants(process.pid) if not name_of(pid).startswith(_AGENTS)}
    assert not wait_for_end(again)
