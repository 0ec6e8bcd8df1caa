"""Number, rank and coordinator of processes."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes, processes_of_task
from stratagem.cluster.spec import ClusterSpec

_FULL = {"chief": ["a:1"], "worker": ["b:1", "grpc://c:1"], "ps": ["d:1"]}


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "expected"),
    [
        (_FULL, "chief", 0, Processes(3, 0, "a:1")),
        (_FULL, "worker", 1, Processes(3, 2, "a:1")),
        (_FULL, "evaluator", 0, Processes(1, 0)),
        ({"worker": ["grpc://b:1", "c:1"]}, "worker", "1", Processes(2, 1, "b:1")),
        ({"worker": ["b:1"]}, None, None, Processes(1, 0, "b:1")),
        ({"worker": ["b:1"], "chief": []}, "worker", 0, Processes(1, 0, "b:1")),
        ({}, None, None, Processes(1, 0)),
    ],
)
def test_processes_are_the_chief_and_the_workers(cluster, task_type, task_id, expected) -> None:
    assert processes_of_task(ClusterSpec(cluster), task_type, task_id) == expected


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        (_FULL, "ps", 0, "A task of type 'ps' has no rank"),
        (_FULL, "worker", 2, "Task id 2 of 'worker' is not in the cluster"),
        ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 0, r"The cluster lists only workers \[0, 2\]"),
        ({"worker": ["a:1", "a:1"]}, "worker", 0, "worker 0 and worker 1 have the same address"),
    ],
)
def test_task_that_cannot_train_with_others_is_refused(
    cluster, task_type, task_id, message
) -> None:
    with pytest.raises(ValueError, match=message):
        processes_of_task(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, "a:1"), "process_id=2 is out of range for num_processes=2"),
        ((0, 0), "process_id=0 is out of range for num_processes=0"),
        (
            (2, -1, "a:1"),
            "process_id=-1 is out of range for num_processes=2(?s:.)*number processes from 0",
        ),
        ((2, 0, "a:1", 1, 1), "local_process_id=1 is out of range for num_local_processes=1"),
        ((2, 0), "2 processes have no coordinator_address"),
        ((2, 0, "a"), "Address 'a' is not of the form host:port"),
    ],
)
def test_processes_that_cannot_be_are_refused(arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        Processes(*arguments)
