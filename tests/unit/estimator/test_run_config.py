"""RunConfig follows TensorFlow's defaults, rules and reading of TF_CONFIG."""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import stratagem as sg
from stratagem.estimator import run_config
from stratagem.estimator.run_config import (
    DistributeConfig,
    RunConfig,
    close_strategies,
    resolve_strategy,
    training_strategy,
)
from stratagem.launch.remote.protocol import JOB_VARIABLE
from tests.unit.estimator.fake_estimator import in_cluster
from tests.unit.parameter_server.clusters import local_strategy


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    yield
    close_strategies()


def test_arguments_come_in_tensorflows_order() -> None:
    names = """model_dir tf_random_seed save_summary_steps save_checkpoints_steps
        save_checkpoints_secs session_config keep_checkpoint_max keep_checkpoint_every_n_hours
        log_step_count_steps train_distribute device_fn protocol eval_distribute
        experimental_distribute experimental_max_worker_delay_secs session_creation_timeout_secs
        checkpoint_save_graph_def"""
    assert list(inspect.signature(RunConfig).parameters) == names.split()


def test_defaults_are_tensorflows() -> None:
    config = RunConfig()
    assert config.model_dir is None
    assert config.tf_random_seed is None
    assert (config.save_summary_steps, config.log_step_count_steps) == (100, 100)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (None, 600)
    assert (config.keep_checkpoint_max, config.keep_checkpoint_every_n_hours) == (5, 10000)
    assert config.session_creation_timeout_secs == 7200
    assert (config.train_distribute, config.eval_distribute) == (None, None)
    assert not config.cluster_spec
    assert (config.task_type, config.task_id) == ("worker", 0)
    assert (config.is_chief, config.master) == (True, "")
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 1)


@pytest.mark.parametrize(
    ("given", "steps", "secs"),
    [
        ({"save_checkpoints_steps": 5}, 5, None),
        ({"save_checkpoints_secs": 7}, None, 7),
        ({"save_checkpoints_steps": None}, None, None),
        ({"save_checkpoints_secs": None}, None, None),
        ({"save_checkpoints_steps": None, "save_checkpoints_secs": None}, None, None),
        ({"save_checkpoints_steps": 5, "save_checkpoints_secs": None}, 5, None),
    ],
)
def test_saves_by_steps_or_by_seconds(given, steps, secs) -> None:
    config = RunConfig(**given)
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs) == (steps, secs)


@pytest.mark.parametrize(
    ("error", "given", "words"),
    [
        (ValueError, {"save_summary_steps": -1}, "steps=-1"),
        (ValueError, {"save_checkpoints_steps": -1}, "steps=-1"),
        (ValueError, {"save_checkpoints_secs": -0.5}, "secs=-0.5"),
        (ValueError, {"keep_checkpoint_max": -1}, "max=-1"),
        (ValueError, {"keep_checkpoint_every_n_hours": 0}, "hours=0"),
        (ValueError, {"log_step_count_steps": 0}, "steps=0"),
        (ValueError, {"experimental_max_worker_delay_secs": -1}, "secs=-1"),
        (ValueError, {"session_creation_timeout_secs": 0}, "secs=0"),
        (TypeError, {"tf_random_seed": 1.5}, r"tf_random_seed=1\.5 is of type float"),
        (TypeError, {"save_summary_steps": "1"}, "received save_summary_steps='1'"),
        (TypeError, {"keep_checkpoint_max": True}, "received keep_checkpoint_max=True"),
        (
            ValueError,
            {"save_checkpoints_steps": 5, "save_checkpoints_secs": 7},
            "RunConfig received save_checkpoints_steps=5 and save_checkpoints_secs=7",
        ),
        (NotImplementedError, {"device_fn": lambda op: "cpu"}, "device_fn=.* is not supported"),
        (ValueError, {"protocol": "http"}, "RunConfig received protocol='http'"),
        (TypeError, {"train_distribute": "mirrored"}, "train_distribute='mirrored' is of type str"),
        (
            TypeError,
            {"experimental_distribute": sg.OneDeviceStrategy("cpu:0")},
            "experimental_distribute=.* is of type OneDevice",
        ),
    ],
)
def test_settings_that_cannot_be_are_errors(error, given, words) -> None:
    with pytest.raises(error, match=words):
        RunConfig(**given)


def test_numbers_that_mean_never_are_taken() -> None:
    config = RunConfig(None, np.int64(-3), 0, 0, keep_checkpoint_max=0, log_step_count_steps=None)
    assert (config.tf_random_seed, config.save_summary_steps) == (-3, 0)
    assert RunConfig(protocol="grpc", session_config={"a": 1}).session_config == {"a": 1}


def test_replace_changes_only_what_is_named() -> None:
    config = RunConfig("a", 3, save_checkpoints_secs=60)
    other = config.replace(model_dir="b", save_checkpoints_steps=10)
    assert (other.model_dir, other.tf_random_seed) == ("b", 3)
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs) == (10, None)
    assert (config.model_dir, config.save_checkpoints_secs) == ("a", 60)
    back = other.replace(save_checkpoints_secs=5)
    assert (back.save_checkpoints_steps, back.save_checkpoints_secs) == (None, 5)
    with pytest.raises(ValueError, match="save_checkpoints_steps=5 and save_checkpoints_secs=7"):
        config.replace(save_checkpoints_steps=5, save_checkpoints_secs=7)


def test_replacing_an_unknown_name_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"replace received the unknown names \['task_type', 'num"):
        RunConfig().replace(task_type="ps", num_gpus=1, model_dir="a")


# Task of this process in the TF_CONFIG cluster, as RunConfig reports it.


CLUSTER = {
    "chief": ["host0:2222"],
    "ps": ["host1:2222", "host2:2222"],
    "worker": ["host3:2222", "host4:2222", "host5:2222"],
}

WORKERS = {"worker": ["a:1", "b:1"]}


def set_tf_config(monkeypatch, cluster: Any, task: Any, **others: Any) -> None:
    parts = {"cluster": cluster, "task": task, **others}
    monkeypatch.setenv("TF_CONFIG", json.dumps({k: v for k, v in parts.items() if v is not None}))


# Type and index, then master and is_chief.
TASKS = [
    (("chief", 0), ("grpc://host0:2222", True)),
    (("worker", 0), ("grpc://host3:2222", False)),
    (("worker", "1"), ("grpc://host4:2222", False)),
    (("ps", 1), ("grpc://host2:2222", False)),
]


@pytest.mark.parametrize(("task", "wanted"), TASKS)
def test_task_of_a_cluster(task, wanted, monkeypatch) -> None:
    set_tf_config(monkeypatch, CLUSTER, {"type": task[0], "index": task[1]})
    config = RunConfig()
    assert (config.master, config.is_chief) == wanted
    assert (config.task_type, config.task_id) == (task[0], int(task[1]))
    assert config.cluster_spec == sg.ClusterSpec(CLUSTER)
    assert (config.num_ps_replicas, config.num_worker_replicas) == (2, 4)
    assert config.replace(tf_random_seed=1).master == config.master


def test_evaluator_sees_an_empty_cluster(monkeypatch) -> None:
    task = {"type": "evaluator", "index": 0}
    set_tf_config(monkeypatch, CLUSTER, task)
    config = RunConfig()
    assert not config.cluster_spec
    assert (config.task_type, config.task_id, config.is_chief) == ("evaluator", 0, False)
    assert config.master == ""
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 0)


def test_single_task_and_session_master(monkeypatch) -> None:
    set_tf_config(monkeypatch, {"chief": ["a:1"]}, {"type": "chief", "index": 0})
    assert RunConfig().master == ""
    set_tf_config(monkeypatch, CLUSTER, {"type": "chief", "index": 0}, session_master="here:9")
    assert RunConfig().master == "here:9"
    set_tf_config(monkeypatch, None, None, session_master="_m")
    assert RunConfig().master == "_m"


def test_worker_0_is_the_chief_where_a_strategy_is_asked_for(monkeypatch) -> None:
    strategy = sg.OneDeviceStrategy("cpu:0")
    for settings in (
        {"train_distribute": strategy},
        {"experimental_distribute": DistributeConfig(strategy)},
    ):
        set_tf_config(monkeypatch, WORKERS, {"type": "worker", "index": 0})
        assert RunConfig(**settings).is_chief
        set_tf_config(monkeypatch, WORKERS, {"type": "worker", "index": 1})
        config = RunConfig(**settings)
        assert not config.is_chief
        assert config.num_worker_replicas == 2


WRONG_TASKS = [
    (WORKERS, {"type": "worker", "index": 0}, "a cluster without a chief"),
    (CLUSTER, None, "its task has type None and index None"),
    (CLUSTER, {"type": "worker"}, "its task has type 'worker' and index None"),
    (CLUSTER, {"type": "worker", "index": 3}, "index 3 is outside the job 'worker'"),
    (CLUSTER, {"type": "worker", "index": -1}, "Task index -1 is invalid"),
    (CLUSTER, {"type": "master", "index": 0}, "Task type 'master' is unknown"),
    (None, {"type": "ps", "index": 0}, "task type 'ps' and index 0 but no cluster"),
    (None, {"type": "worker", "index": 1}, "task type 'worker' and index 1 but no cluster"),
]


@pytest.mark.parametrize(("cluster", "task", "words"), WRONG_TASKS)
def test_cluster_that_cannot_be_is_an_error(cluster, task, words, monkeypatch) -> None:
    set_tf_config(monkeypatch, cluster, task)
    with pytest.raises(ValueError, match=words):
        RunConfig()


def test_model_dir_is_the_arguments_or_the_variables(monkeypatch) -> None:
    assert RunConfig(Path("a") / "b").model_dir == "a/b"
    set_tf_config(monkeypatch, None, None, model_dir="there")
    assert RunConfig().model_dir == RunConfig("there").model_dir == "there"
    with pytest.raises(ValueError, match="'here' in RunConfig and 'there' in TF_CONFIG"):
        RunConfig("here")
    with pytest.raises(ValueError, match="model_dir='' is empty"):
        RunConfig("")
    set_tf_config(monkeypatch, None, None, model_dir="")
    with pytest.raises(ValueError, match="model_dir='' is empty"):
        RunConfig()


# Strategies and clusters that a DistributeConfig takes and refuses.


def test_strategies_come_from_either_place() -> None:
    a, b = sg.OneDeviceStrategy("cpu:0"), sg.OneDeviceStrategy("cpu:1")
    config = RunConfig(experimental_distribute=DistributeConfig(a, b))
    assert config.train_distribute is a
    assert config.eval_distribute is b
    mixed = RunConfig(train_distribute=a, experimental_distribute=DistributeConfig(None, b))
    assert (mixed.train_distribute, mixed.eval_distribute) == (a, b)
    other = config.replace(experimental_distribute=DistributeConfig(b))
    assert (other.train_distribute, other.eval_distribute) == (b, None)
    assert config.replace(tf_random_seed=2).eval_distribute is b
    with pytest.raises(ValueError, match="train_distribute is set both directly"):
        RunConfig(train_distribute=a, experimental_distribute=DistributeConfig(b))
    with pytest.raises(TypeError, match="eval_distribute='mirrored' is of type str"):
        DistributeConfig(None, "mirrored")
    with pytest.raises(ValueError, match="eval_distribute is set both directly"):
        config.replace(eval_distribute=a)


def test_remote_cluster_is_a_clients(monkeypatch) -> None:
    both = DistributeConfig(sg.OneDeviceStrategy("cpu:0"), remote_cluster=WORKERS)
    assert both.remote_cluster == sg.ClusterSpec(WORKERS)
    config = RunConfig(experimental_distribute=both)
    assert (bool(config.cluster_spec), config.is_chief) == (False, True)
    set_tf_config(monkeypatch, WORKERS, {"type": "worker", "index": 0})
    with pytest.raises(ValueError, match="TF_CONFIG makes this process a task of"):
        RunConfig(experimental_distribute=both)


# Training strategies are created once and closed at exit.


def test_function_makes_one_strategy_for_all_that_name_it() -> None:
    def make() -> sg.Strategy:
        return sg.MirroredStrategy(["cpu:0", "cpu:1"])

    config = sg.estimator.RunConfig(train_distribute=make)
    made = training_strategy(config)
    assert made is not None
    assert made.num_replicas_in_sync == 2
    assert training_strategy(sg.estimator.RunConfig(train_distribute=make)) is made
    assert resolve_strategy(lambda: sg.OneDeviceStrategy("cpu:1")) is not made
    assert resolve_strategy(made) is made
    assert training_strategy(sg.estimator.RunConfig()) is None
    with pytest.raises(TypeError, match="=3 is of type int"):
        resolve_strategy(lambda: 3)


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
        run_config._close_at_exit()  # the others are not waited for
        assert closed == []
        monkeypatch.delattr(sys, "last_value")
        run_config._close_at_exit()
        close_strategies()
        assert closed == [1]
        monkeypatch.undo()
