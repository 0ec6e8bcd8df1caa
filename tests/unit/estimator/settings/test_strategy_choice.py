"""Training strategies are created once and closed at exit."""

from __future__ import annotations

import json
import sys

import pytest

import stratagem as sg
from stratagem.estimator import run_config as strategy_choice
from stratagem.estimator.run_config import (
    close_strategies,
    resolve_strategy,
    training_strategy,
)
from stratagem.launch.remote.jobs.lockstep import JOB_VARIABLE
from tests.unit.parameter_server.clusters import local_strategy


@pytest.fixture(autouse=True)
def _nothing_made(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    close_strategies()


def in_cluster(monkeypatch, task_type: str, **jobs: int) -> None:
    cluster = {job: [f"{job}{i}:1" for i in range(number)] for job, number in jobs.items()}
    cluster_config = {"cluster": cluster, "task": {"type": task_type, "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster_config))


def test_function_makes_one_strategy_for_all_that_name_it() -> None:
    def make() -> sg.Strategy:
        return sg.MirroredStrategy(["cpu:0", "cpu:1"])

    config = sg.estimator.RunConfig(train_distribute=make)
    made = training_strategy(config)
    assert made is not None
    assert made.num_replicas_in_sync == 2
    assert training_strategy(sg.estimator.RunConfig(train_distribute=make)) is made
    assert resolve_strategy(lambda: sg.OneDeviceStrategy("cpu:1")) is not made


def test_strategies_and_none_are_themselves() -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    assert resolve_strategy(strategy) is strategy
    assert resolve_strategy(None) is None
    assert training_strategy(sg.estimator.RunConfig()) is None


@pytest.mark.slow
def test_estimator_trains_and_evaluates_with_what_functions_make(tmp_path) -> None:
    from tests.unit.estimator.independent_workers import X, Y, model_fn

    made = []

    def make() -> sg.Strategy:
        made.append(sg.MirroredStrategy(["cpu:0", "cpu:1"]))
        return made[-1]

    config = sg.estimator.RunConfig(train_distribute=make, eval_distribute=make)
    estimator = sg.estimator.Estimator(model_fn, tmp_path, config)
    assert made == []
    estimator.train(lambda: (X[:8], Y[:8]), steps=2)
    evaluated = estimator.evaluate(lambda: (X, Y))
    alone = sg.estimator.Estimator(model_fn, tmp_path).evaluate(lambda: (X, Y))
    assert evaluated["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert len(made) == 1


def test_function_that_makes_something_else_is_reported() -> None:
    with pytest.raises(TypeError, match="returned 3 of type int"):
        resolve_strategy(lambda: 3)


def test_what_is_no_function_and_no_strategy_is_reported() -> None:
    with pytest.raises(TypeError, match="train_distribute='mirrored' is of type str"):
        sg.estimator.RunConfig(train_distribute="mirrored")  # type: ignore[arg-type]


def test_cluster_with_servers_trains_on_them_where_nobody_asks_for_more(monkeypatch) -> None:
    in_cluster(monkeypatch, "ps", chief=1, ps=1, worker=1)
    strategy = training_strategy(sg.estimator.RunConfig())
    assert isinstance(strategy, sg.ParameterServerStrategy)
    assert strategy.executor.task == ("ps", 0)


def test_what_a_client_has_sent_coordinates_the_workers(monkeypatch) -> None:
    monkeypatch.setenv(JOB_VARIABLE, "1")
    in_cluster(monkeypatch, "worker", chief=1, ps=1, worker=1)
    strategy = training_strategy(sg.estimator.RunConfig())
    assert isinstance(strategy, sg.ParameterServerStrategy)
    assert strategy.executor.task == ("worker", 0)  # where it would train otherwise


def test_workers_that_share_nothing_are_refused(monkeypatch) -> None:
    in_cluster(monkeypatch, "chief", chief=1, worker=2)
    with pytest.raises(ValueError, match=r"3 tasks of .* cannot train together without a strategy"):
        training_strategy(sg.estimator.RunConfig())


def test_evaluator_builds_a_strategy_of_workers_by_itself(monkeypatch) -> None:
    in_cluster(monkeypatch, "evaluator", chief=1, worker=2)
    strategy = resolve_strategy(sg.MultiWorkerMirroredStrategy)
    assert strategy is not None
    assert strategy.num_replicas_in_sync == 8
    assert not strategy.topology.spans_processes


def test_what_was_made_is_closed_once(monkeypatch) -> None:
    with local_strategy(1) as strategy:
        closed = []
        monkeypatch.setattr(strategy, "close", lambda: closed.append(1))
        resolve_strategy(lambda: strategy)
        monkeypatch.setattr(sys, "last_value", ValueError(), raising=False)
        strategy_choice._close_at_exit()  # the others are not waited for
        assert closed == []
        monkeypatch.delattr(sys, "last_value")
        strategy_choice._close_at_exit()
        close_strategies()
        assert closed == [1]
        monkeypatch.undo()
