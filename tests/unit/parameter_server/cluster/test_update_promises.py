"""Updates of functions whose workers or servers are killed, compared with a plain count.

In processes of this machine, as a user starts them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.launch.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore:Parameter servers restarted:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:A function ran again on:RuntimeWarning"),
]

_NUM_WORKERS = 2
# Each worker may have made an update that was lost before it got the answer: it makes it again.
_MOST_UNANSWERED = _NUM_WORKERS


@pytest.fixture(params=[False, True], ids=["default", "durable"])
def strategy(request, tmp_path, monkeypatch) -> Iterator[sg.ParameterServerStrategy]:
    """One server, whose journal is written seldom unless each update waits for it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    options = sg.coordinator.options(durable_updates=request.param, journal_interval_s=0.5)
    with sg.ParameterServerStrategy(
        num_workers=_NUM_WORKERS, num_servers=1, options=options
    ) as made:
        ClusterCoordinator(made)
        yield made
    assert not list(tmp_path.glob("*journal*"))


@pytest.mark.slow
def test_update_of_a_function_whose_worker_is_killed_counts_once(strategy, tmp_path) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = sg.Variable(np.zeros(3, "float32"))
        table = sg.Variable(np.zeros(3, "float32"))
    mark = tmp_path / "mark"

    def work(number: int) -> int:
        variable.assign_add(np.ones(3, "float32"))
        if number == 10 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        table.assign_add(np.ones(3, "float32"))
        return number

    values = [coordinator.schedule(work, args=(number,)) for number in range(30)]
    coordinator.join()
    assert coordinator.fetch(values) == list(range(30))
    for one in (variable, table):
        np.testing.assert_array_equal(np.asarray(one.value), 30)
    counts = coordinator.updates()["assign_add"]
    assert (counts["applied"], counts["lost"]) == (60, 0)
    assert counts["repeated"] >= 1  # also of functions that the worker ended before, in one group


@pytest.mark.slow
def test_update_of_a_function_whose_worker_is_only_silent_counts_once(tmp_path) -> None:
    """The worker is given up in its first run, and goes on after the second."""
    options = sg.coordinator.options(recovery_timeout_s=4.0)
    stopped, ended = tmp_path / "stopped", tmp_path / "ended"
    with sg.ParameterServerStrategy(num_workers=2, num_servers=1, options=options) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            variable = sg.Variable(np.zeros(3, "float32"))
        strategy.placement.remote.variables.secure()

        def work(number: int) -> int:
            variable.assign_add(np.ones(3, "float32"))
            is_first_run = number == 5 and not stopped.exists()
            if is_first_run:
                stopped.write_text(str(os.getpid()))
                os.kill(os.getpid(), signal.SIGSTOP)
            variable.assign_add(np.ones(3, "float32"))
            if is_first_run:
                ended.touch()
            return number

        values = [coordinator.schedule(work, args=(number,)) for number in range(20)]
        coordinator.join()
        os.kill(int(stopped.read_text()), signal.SIGCONT)
        until(ended.exists)
        assert coordinator.fetch(values) == list(range(20))
        np.testing.assert_array_equal(np.asarray(variable.value), 40)


@pytest.mark.slow
def test_updates_lost_with_a_killed_server_are_reported(strategy) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = sg.Variable(np.zeros(3, "float32"))
    strategy.placement.remote.variables.secure()

    def work() -> None:
        variable.assign_add(np.ones(3, "float32"))
        time.sleep(0.002)

    num_calls = 1200
    killer = threading.Thread(target=_kill, args=(strategy.cluster.servers, coordinator))
    killer.start()
    for _ in range(num_calls):
        coordinator.schedule(work)
    coordinator.join()
    killer.join()
    missing = num_calls - int(np.asarray(variable.value)[0])
    lost = coordinator.updates()["assign_add"]["lost"]
    if strategy.limits.durable_updates:
        assert (missing, lost) == (0, 0)
    else:
        assert missing > 0
        assert missing <= lost <= missing + 2 * _MOST_UNANSWERED
        assert coordinator.num_lost_updates == lost


def _kill(servers: Any, coordinator: ClusterCoordinator) -> None:
    """Kills the server twice while functions run."""
    for num_done in (200, 600):
        until(lambda num_done=num_done: coordinator._queue.counts["done"] >= num_done)
        servers.kill(0)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [False], ids=["default"], indirect=True)
def test_training_goes_on_with_an_optimizer_of_the_user(strategy) -> None:
    """Its class is defined here: a restarted server cannot import it."""

    class Halving(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            super().update_step(gradient * 0.5, variable, learning_rate)

    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        variable = sg.Variable(np.zeros(3, "float32"))
        optimizer = Halving(1.0)
        optimizer.build([variable])

    def step() -> Any:
        optimizer.apply([np.ones(3, "float32")], [variable])
        return variable.value

    for _ in range(3):
        coordinator.schedule(lambda: strategy.run(step))
    coordinator.join()
    strategy.placement.remote.variables.secure()
    strategy.cluster.servers.kill(0)
    for _ in range(3):
        coordinator.schedule(lambda: strategy.run(step))
    coordinator.join()
    np.testing.assert_array_equal(np.asarray(variable.value), -0.5 * 6)


def test_clean_end_leaves_nothing(tmp_path, monkeypatch) -> None:
    for name in ("TMPDIR", "STRATAGEM_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with sg.ParameterServerStrategy(num_workers=1, num_servers=2) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            variable = sg.Variable(np.zeros(2**16, "float32"))

        def work() -> None:
            variable.assign_add(np.ones(2**16, "float32"))

        coordinator.schedule(work)
        coordinator.join()
        assert list(tmp_path.iterdir())
    # Compiled programs stay for the next run.
    assert [one.name for one in tmp_path.iterdir() if one.name != "programs"] == []
