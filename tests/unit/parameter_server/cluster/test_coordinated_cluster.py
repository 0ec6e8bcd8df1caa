"""A whole cluster of processes on this machine: trained on, and killed in parts."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.launch import processes
from stratagem.launch.processes import Restarts
from stratagem.parameter_server import strategy as served_processes
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.cluster_plan import ClusterPlan, JournalPlan
from stratagem.parameter_server.coordinator.cluster_coordinator import ClusterCoordinator
from tests.unit.launch.waiting import until

pytestmark = [
    pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning"),
    pytest.mark.filterwarnings("ignore:Parameter servers restarted:RuntimeWarning"),
]

RNG = np.random.default_rng(2)
X = RNG.normal(size=(64, 6)).astype("float32")
Y = RNG.normal(size=(64, 2)).astype("float32")


@pytest.fixture(scope="module")
def strategy() -> Iterator[sg.ParameterServerStrategy]:
    with sg.ParameterServerStrategy(num_workers=2, num_servers=1) as made:
        ClusterCoordinator(made)  # starts the workers
        yield made


@pytest.fixture(scope="module")
def model(strategy: sg.ParameterServerStrategy) -> keras.Model:
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    return model


def test_workers_train_and_evaluate(strategy, model) -> None:
    client = strategy.placement.remote.variables.client
    num_steps, num_pushes = int(model.optimizer.iterations), sum(client.staleness().values())
    before = model.evaluate(X, Y, verbose=0)[0]
    model.fit(X, Y, batch_size=4, epochs=5, verbose=0)
    assert int(model.optimizer.iterations) == num_steps + 80
    alone = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2)])
    alone.compile(loss="mse", metrics=["mae"])
    alone.set_weights(model.get_weights())
    after = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(after, alone.evaluate(X, Y, verbose=0), rtol=1e-5)
    assert after[0] < before
    assert sum(client.staleness().values()) == num_pushes + 80


@pytest.mark.slow
def test_functions_of_a_killed_worker_run_elsewhere(strategy, model) -> None:
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        counted = keras.metrics.Sum()

    def work(number: int) -> int:
        time.sleep(0.01)
        counted.update_state(1.0)
        return number

    values = []
    for number in range(300):
        if number in (50, 200):
            coordinator.fetch(values[number - 50])
            strategy.executor.coordinator.workers.kill(number % 2)
        values.append(coordinator.schedule(work, args=(number,)))
    coordinator.join()
    assert coordinator.fetch(values) == list(range(300))
    assert float(counted.result()) == 300.0
    # The one that was killed is taken in again.
    named = [coordinator.schedule(work, args=(1,), worker=worker) for worker in range(2)]
    assert coordinator.fetch(named) == [1, 1]


@pytest.mark.slow
def test_workers_make_their_own_data_and_may_be_killed(strategy, model) -> None:
    def dataset_fn(context: sg.InputContext) -> Any:
        rows = range(4 * context.input_pipeline_id, len(X), 4 * context.num_input_pipelines)
        return (_slow_batch(X[row : row + 4], Y[row : row + 4]) for row in rows)

    expected = model.evaluate(X, Y, verbose=0)
    killer = threading.Timer(0.2, strategy.executor.coordinator.workers.kill, args=(1,))
    killer.start()
    result = model.evaluate(sg.DatasetCreator(dataset_fn), verbose=0)
    killer.join()
    np.testing.assert_allclose(result, expected, rtol=1e-5)


def _slow_batch(x: Any, y: Any) -> Any:
    time.sleep(0.1)
    return x, y


def test_killed_server_goes_on_from_its_journal(strategy, model) -> None:
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    strategy.placement.remote.variables.client.journal()
    iterations = int(model.optimizer.iterations)
    weights = model.get_weights()
    strategy.cluster.servers.kill(0)
    client = strategy.placement.remote.variables.client
    until(lambda: client.describe()[0]["restored_version"] is not None)  # another process kills it
    state = client.describe()[0]
    for one, before in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(one, before)
    assert int(model.optimizer.iterations) == iterations
    assert state["restored_version"] == state["version"] == iterations
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    assert int(model.optimizer.iterations) == iterations + 16


def test_who_asks_a_server_without_restarts_learns_why_at_once(monkeypatch) -> None:
    monkeypatch.setattr(processes, "Restarts", lambda _: Restarts(0))
    with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0])
        strategy.cluster.servers.kill(0)
        until(lambda: strategy.cluster.locate_server(0) is None)
        # Not "gave no answer", which comes after the limit on silence.
        with pytest.raises(sg.errors.UnavailableError, match="ps 0 ended and has no restarts left"):
            np.asarray(variable.value)


@pytest.mark.slow
def test_another_strategy_goes_on_from_the_journals(tmp_path) -> None:
    def train(epochs: int) -> tuple[list[np.ndarray], int]:
        options: dict[str, Any] = {"num_workers": 1, "num_servers": 1, "journal_dir": tmp_path}
        with sg.ParameterServerStrategy(**options) as strategy, strategy.scope():
            model = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(2, name="d")])
            model.compile(keras.optimizers.Adam(0.05, name="adam"), "mse")
            if epochs:
                model.fit(X, Y, batch_size=16, epochs=epochs, shuffle=False, verbose=0)
            else:
                model.evaluate(X, Y, verbose=0)
                model.optimizer.build(model.trainable_variables)
                coordinator = ClusterCoordinator(strategy)
                coordinator.schedule(lambda: len(model.weights)).fetch()
            return model.get_weights(), int(model.optimizer.iterations)

    keras.backend.clear_session(free_memory=False)
    weights, iterations = train(2)
    assert iterations == 8
    keras.backend.clear_session(free_memory=False)
    found, found_iterations = train(0)
    assert found_iterations == 8
    for one, before in zip(found, weights, strict=True):
        np.testing.assert_array_equal(one, before)


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


@pytest.mark.parametrize(
    ("jobs", "task"),
    [
        ({"chief": ["a:1"], "ps": ["b:1"]}, ("ps", 0)),
        ({"chief": ["a:1"], "worker": ["b:1"]}, ("worker", 0)),
        ({"chief": ["a:1"], "ps": ["b:1"]}, ("chief", None)),
        ({}, (None, None)),
    ],
    ids=["server", "no servers", "no index", "no cluster"],
)
def test_program_that_is_none_of_the_workers_is_reported(jobs, task) -> None:
    with pytest.raises(ValueError, match=r"independent=True was used in task .* of a cluster with"):
        ClusterPlan.independent(sg.ClusterSpec(jobs), task)
    spec = sg.ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]})
    plan = ClusterPlan.independent(spec, ("worker", 1))  # the chief is one of them
    assert (plan.num_workers, plan.num_servers, plan.task) == (3, 1, ("worker", 1))
    with pytest.raises(ValueError, match="worker"):
        ClusterPlan.independent(spec, ("worker", 2))
    assert ClusterPlan.of(spec, "chief").num_servers == 1
    with pytest.raises(ValueError, match="was created in a task of type 'worker'"):
        ClusterPlan.of(spec, "worker")


@pytest.mark.parametrize(
    ("independent", "task"),
    [
        (True, ("ps", 0)),
        (True, ("evaluator", 0)),
        (False, ("ps", 0)),
        (False, ("worker", 1)),
        (False, ("evaluator", 0)),
    ],
    ids=str,
)
def test_tasks_that_do_not_train_make_a_strategy_that_starts_nothing(
    monkeypatch, independent: bool, task: tuple[str, int]
) -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
    cluster_config = {"cluster": cluster, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster_config))
    with sg.ParameterServerStrategy(independent=independent) as strategy:
        assert repr(task) in repr(strategy)
        with pytest.raises(RuntimeError, match=f"used in {task[0]} {task[1]}, which does not"):
            strategy.run(print)
        with pytest.raises(RuntimeError, match="used in"), strategy.scope():
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backup_workers": 1}, "for 2 workers without synchronous=True"),
        ({"backup_workers": -1, "synchronous": True}, "backup_workers=-1 was passed for 2 workers"),
        ({"backup_workers": 2, "synchronous": True}, "backup_workers=2 was passed for 2 workers"),
        *(
            ({name: number}, f"received {name}=")
            for name in ("num_workers", "num_servers")
            for number in (0, 1.5, True)
        ),
    ],
    ids=str,
)
def test_numbers_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    is_number = all(type(value) is int for value in options.values())
    error = ValueError if is_number or "synchronous" in options else TypeError
    with pytest.raises(error, match=message):
        sg.ParameterServerStrategy(**{"num_workers": 2, **options})


# What serves in the processes of servers.


def test_server_of_a_run_leaves_no_journal(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(served_processes, "_compute_inline", lambda: None)
    journals = JournalPlan(str(tmp_path / "journals" / "run"), is_temporary=True)
    with served_processes.serve_server(0, ClusterKeys.make(), journals):
        assert (tmp_path / "journals" / "run" / "server-0.journal").exists()
    assert list(tmp_path.iterdir()) == []


def test_server_writes_its_journal_as_often_as_requested(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(served_processes, "_compute_inline", lambda: None)
    keys = ClusterKeys.make()
    with (
        served_processes.serve_server(0, keys, JournalPlan(str(tmp_path), 3600.0)) as seldom,
        served_processes.serve_server(1, keys, JournalPlan(str(tmp_path), 0.01)) as often,
        contextlib.closing(Connections(keys, [seldom.address, often.address])) as connections,
    ):
        client = ServerClient(connections)
        for server in (0, 1):
            placement = ShardLayout(f"v{server}", (2,), "float32", (server,), (2,))
            client.create(placement, np.zeros(2, "float32"))
        until(lambda: client.describe()[1]["journaled_version"] is not None)
        assert client.describe()[0]["journaled_version"] is None
    found = sorted(path.name for path in tmp_path.glob("*.journal"))
    assert found == ["server-0.journal", "server-1.journal"]
