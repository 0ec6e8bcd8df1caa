"""Arguments and clusters that PreemptionCheckpointHandler rejects."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

import stratagem as sg
from tests.unit.checkpoint.groups import LIMIT_S


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("folder", [None, ""])
def test_checkpoint_without_a_folder_is_refused(folder) -> None:
    with pytest.raises(
        sg.errors.InvalidArgumentError, match="Checkpoint was passed with checkpoint_dir="
    ):
        sg.PreemptionCheckpointHandler(None, sg.train.Checkpoint(step=sg.Variable(0)), folder)


@pytest.mark.parametrize(
    "resolver",
    [
        sg.cluster_resolver.SimpleClusterResolver(
            sg.ClusterSpec({"chief": ["a:1"], "ps": ["b:1"]}), task_type="chief", task_id=0
        ),
        sg.cluster_resolver.SimpleClusterResolver(
            sg.ClusterSpec({"worker": ["a:1"], "ps": ["b:1"]}), task_type="worker", task_id=0
        ),
    ],
)
def test_parameter_servers_are_refused(tmp_path: Path, resolver) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    with pytest.raises(NotImplementedError, match="The cluster has parameter servers"):
        sg.PreemptionCheckpointHandler(resolver, checkpoint, tmp_path)


def test_processes_that_do_not_know_each_other_are_refused(tmp_path: Path) -> None:
    spec = sg.ClusterSpec({"worker": ["a:1", "b:1"]})
    resolver = sg.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=1)
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    with pytest.raises(
        RuntimeError, match="has 2 processes, but this one is not connected to the others"
    ):
        sg.PreemptionCheckpointHandler(resolver, checkpoint, tmp_path)


def test_one_task_of_a_cluster_is_a_process_by_itself(tmp_path: Path) -> None:
    spec = sg.ClusterSpec({"worker": ["a:1"]})
    resolver = sg.cluster_resolver.SimpleClusterResolver(spec, task_type="worker", task_id=0)
    handler = sg.PreemptionCheckpointHandler(
        resolver, sg.train.Checkpoint(step=sg.Variable(0)), tmp_path
    )
    handler.stop()
    assert handler.total_run_calls == 0


@pytest.mark.parametrize("index", range(3))
def test_arguments_of_another_type_are_refused(tmp_path: Path, index: int) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    arguments: list[Any] = [None, checkpoint, tmp_path, None]
    arguments[(0, 1, 3)[index]] = "abc"
    name = ("cluster_resolver", "checkpoint_or_checkpoint_manager", "termination_config")[index]
    with pytest.raises(TypeError, match=f"{name}='abc' is of type str"):
        sg.PreemptionCheckpointHandler(*arguments)


def test_signals_are_heard_in_the_main_thread_only(tmp_path: Path) -> None:
    checkpoint = sg.train.Checkpoint(step=sg.Variable(0))
    errors: list[BaseException] = []

    def start() -> None:
        try:
            sg.PreemptionCheckpointHandler(None, checkpoint, tmp_path)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(LIMIT_S)
    assert "Cannot listen to signals in thread" in str(errors[0])
