"""Task of this process in the TF_CONFIG cluster, as RunConfig reports it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from stratagem.estimator.run_config import DistributeConfig, RunConfig

CLUSTER = {
    "chief": ["host0:2222"],
    "ps": ["host1:2222", "host2:2222"],
    "worker": ["host3:2222", "host4:2222", "host5:2222"],
}

WORKERS = {"worker": ["a:1", "b:1"]}


def set_tf_config(monkeypatch, cluster: Any, task: Any, **others: Any) -> None:
    parts = {"cluster": cluster, "task": task, **others}
    monkeypatch.setenv("TF_CONFIG", json.dumps({k: v for k, v in parts.items() if v is not None}))


# Type and index, then master, is_chief and global_id_in_cluster, as RunConfig's documentation has
# them; TensorFlow's own has the prefix.
TASKS = [
    (("chief", 0), ("grpc://host0:2222", True, 0)),
    (("worker", 0), ("grpc://host3:2222", False, 1)),
    (("worker", "1"), ("grpc://host4:2222", False, 2)),
    (("worker", 2), ("grpc://host5:2222", False, 3)),
    (("ps", 0), ("grpc://host1:2222", False, 4)),
    (("ps", 1), ("grpc://host2:2222", False, 5)),
]


@pytest.mark.parametrize(("task", "wanted"), TASKS)
def test_task_of_a_cluster(task, wanted, monkeypatch) -> None:
    set_tf_config(monkeypatch, CLUSTER, {"type": task[0], "index": task[1]})
    config = RunConfig()
    assert (config.master, config.is_chief, config.global_id_in_cluster) == wanted
    assert (config.task_type, config.task_id) == (task[0], int(task[1]))
    assert config.cluster_spec == sg.ClusterSpec(CLUSTER)
    assert (config.num_ps_replicas, config.num_worker_replicas) == (2, 4)
    assert config.replace(tf_random_seed=1).master == config.master


def test_evaluator_sees_an_empty_cluster(monkeypatch) -> None:
    task = {"type": "evaluator", "index": 0}
    set_tf_config(monkeypatch, CLUSTER, task, eval_session_master="grpc://eval:1")
    config = RunConfig()
    assert not config.cluster_spec
    assert (config.task_type, config.task_id, config.is_chief) == ("evaluator", 0, False)
    assert (config.master, config.evaluation_master) == ("", "grpc://eval:1")
    assert (config.num_ps_replicas, config.num_worker_replicas) == (0, 0)
    assert config.global_id_in_cluster is None


def test_single_task_and_session_master(monkeypatch) -> None:
    set_tf_config(monkeypatch, {"chief": ["a:1"]}, {"type": "chief", "index": 0})
    assert RunConfig().master == ""
    set_tf_config(monkeypatch, CLUSTER, {"type": "chief", "index": 0}, session_master="here:9")
    assert RunConfig().master == "here:9"
    set_tf_config(monkeypatch, None, None, session_master="_m", eval_session_master="_e")
    assert (RunConfig().master, RunConfig().evaluation_master) == ("_m", "_e")


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
        assert (config.is_chief, config.global_id_in_cluster) == (False, 1)
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


def test_service_is_kept_and_has_to_be_an_object(monkeypatch) -> None:
    set_tf_config(monkeypatch, None, None, service={"key": 1})
    assert RunConfig().service == {"key": 1}
    set_tf_config(monkeypatch, None, None, service=3)
    with pytest.raises(TypeError, match=r"service'.* is 3 of type int"):
        RunConfig()


def test_model_dir_is_the_arguments_or_the_variables(monkeypatch) -> None:
    assert RunConfig(Path("a") / "b").model_dir == "a/b"
    set_tf_config(monkeypatch, None, None, model_dir="there")
    assert RunConfig().model_dir == RunConfig("there").model_dir == "there"
    with pytest.raises(ValueError, match="'here' in RunConfig and 'there' in TF_CONFIG"):
        RunConfig("here")
    with pytest.raises(ValueError, match="model_dir is the empty string"):
        RunConfig("")
    set_tf_config(monkeypatch, None, None, model_dir="")
    with pytest.raises(ValueError, match="model_dir is the empty string"):
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
    with pytest.raises(ValueError, match="eval_distribute is set both directly"):
        config.replace(eval_distribute=a)


def test_what_is_no_strategy_is_an_error() -> None:
    with pytest.raises(TypeError, match="train_distribute='mirrored' is of type str"):
        RunConfig(train_distribute="mirrored")
    with pytest.raises(TypeError, match="eval_distribute='mirrored' is of type str"):
        DistributeConfig(None, "mirrored")
    with pytest.raises(TypeError, match=r"experimental_distribute=.* is of type OneDevice"):
        RunConfig(experimental_distribute=sg.OneDeviceStrategy("cpu:0"))


def test_remote_cluster_is_a_clients(monkeypatch) -> None:
    both = DistributeConfig(sg.OneDeviceStrategy("cpu:0"), remote_cluster=WORKERS)
    assert both.remote_cluster == sg.ClusterSpec(WORKERS)
    config = RunConfig(experimental_distribute=both)
    assert (bool(config.cluster_spec), config.is_chief) == (False, True)
    set_tf_config(monkeypatch, WORKERS, {"type": "worker", "index": 0})
    with pytest.raises(ValueError, match="TF_CONFIG makes this process a task of"):
        RunConfig(experimental_distribute=both)
