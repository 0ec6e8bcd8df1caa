"""Strategies and clusters that a DistributeConfig takes and refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stratagem as sg
from stratagem.estimator.settings.run_config import DistributeConfig, RunConfig

WORKERS = {"worker": ["a:1", "b:1"]}


def set_tf_config(monkeypatch, cluster: Any, task: Any, **others: Any) -> None:
    parts = {"cluster": cluster, "task": task, **others}
    monkeypatch.setenv("TF_CONFIG", json.dumps({k: v for k, v in parts.items() if v is not None}))


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
