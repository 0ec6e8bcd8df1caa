"""Standalone clients send training to a cluster."""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from tests.unit.estimator.independent_workers import X, Y, model_fn
from tests.unit.launch.remote.heads import Head, head

_CLUSTER = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}


@pytest.fixture
def cluster_head(tmp_path, monkeypatch):
    """Fake cluster head that runs jobs as local processes."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    path = os.pathsep.join([str(Path(sg.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    (tmp_path / "head").mkdir()
    with head(tmp_path / "head") as made:
        monkeypatch.setenv("STRATAGEM_JOBS_PORT", made.url.rpartition(":")[2])
        made.machines = [{f"{job}:0": 1.0} for job in _CLUSTER]
        yield made


def train_fn() -> Any:
    print("reading", len(X), "rows")
    return sg.input.Dataset((X, Y), batch_size=8)


def eval_fn() -> Any:
    return sg.input.Dataset((X, Y), batch_size=32)


def client_of(folder: Path, strategy: Any) -> sg.estimator.Estimator:
    both = sg.estimator.DistributeConfig(train_distribute=strategy, remote_cluster=_CLUSTER)
    config = sg.estimator.RunConfig(experimental_distribute=both, save_checkpoints_steps=5)
    return sg.estimator.Estimator(model_fn, folder, config)


@pytest.mark.slow
def test_model_is_trained_on_the_cluster_and_its_metrics_come_back(
    cluster_head: Head, tmp_path, capfd
) -> None:
    # As a laptop has it: there the task makes it again.
    estimator = client_of(tmp_path / "model", sg.OneDeviceStrategy("cpu:0"))
    metrics, exports = sg.estimator.train_and_evaluate(
        estimator,
        sg.estimator.TrainSpec(train_fn, max_steps=7),
        sg.estimator.EvalSpec(eval_fn, steps=None, throttle_secs=0),
    )
    assert exports == []
    assert "reading 96 rows" in capfd.readouterr().out
    assert len(cluster_head.processes) == 1
    here = sg.estimator.Estimator(model_fn, tmp_path / "model")
    assert metrics == pytest.approx(here.evaluate(eval_fn), rel=1e-5)
    assert metrics["global_step"] == 7
    one = sg.estimator.Estimator(model_fn, tmp_path / "one")
    one.train(train_fn, max_steps=7)
    assert metrics == pytest.approx(one.evaluate(eval_fn), rel=1e-4)


def test_what_cannot_be_sent_is_named(cluster_head: Head, tmp_path) -> None:
    lock = threading.Lock()

    def locked_fn() -> Any:
        with lock:
            return train_fn()

    estimator = client_of(tmp_path, sg.OneDeviceStrategy("cpu:0"))
    with pytest.raises(TypeError, match=r"Variable 'lock' of .*input_fn.* cannot be sent to the"):
        sg.estimator.train_and_evaluate(
            estimator,
            sg.estimator.TrainSpec(locked_fn, max_steps=7),
            sg.estimator.EvalSpec(eval_fn),
        )
    with pytest.raises(TypeError, match=r"Variable 'lock' of .* cannot be sent to the"):
        estimator.train(locked_fn, steps=3)
    assert cluster_head.processes == {}


def test_settings_that_are_sent_are_of_the_task_that_gets_them(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    both = sg.estimator.DistributeConfig(strategy, remote_cluster=_CLUSTER)
    config = sg.estimator.RunConfig(
        "folder", experimental_distribute=both, save_checkpoints_steps=3, tf_random_seed=1
    )
    sent = pickle.dumps(config)
    cluster_config = {"cluster": _CLUSTER, "task": {"type": "chief", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster_config))
    got = pickle.loads(sent)
    assert (got.task_type, got.num_ps_replicas, got.num_worker_replicas) == ("chief", 1, 2)
    assert (got.model_dir, got.save_checkpoints_steps, got.save_checkpoints_secs) == (
        "folder",
        3,
        None,
    )
    assert got.tf_random_seed == 1
    assert got.experimental_distribute.remote_cluster is None
    assert not isinstance(got.train_distribute, sg.Strategy)
    assert re.search("cpu:0.*cpu:1", repr(got.train_distribute()))
