"""Valid and invalid clusters."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import check_cluster
from stratagem.cluster.spec import ClusterSpec

RIGHT = [
    ({"worker": ["a:1", "b:1"]}, "worker", 1),
    ({"worker": ["a:1", "a:2"], "ps": ["a:3"]}, "ps", "0"),
    ({"worker": ["localhost:1", "127.0.0.1:2", "[::1]:3"]}, "worker", 2),
    ({"worker": ["[fd00::1]:1", "[fd00::2]:1"]}, "worker", 0),
    ({"worker": ["a:1", "b:1"]}, "evaluator", 0),
    ({"worker": {1: "a:1"}}, "worker", 1),
    ({"worker": ["a:1"]}, None, None),
    ({"worker": ["localhost:1"]}, "worker", 0),
    ({}, None, None),
    ({}, "worker", 0),
]
WRONG = [
    ({"worker": ["a:1", "b:1", "A:1"]}, "worker", 0, "worker 0 and worker 2 have the same addr"),
    ({"worker": ["a:1"], "ps": ["grpc://a:1"]}, "ps", 0, "worker 0 and ps 0 have the same addre"),
    ({"worker": ["a:1", "b:1"]}, "worker", 2, "Task id 2 of 'worker' is not in the cluster"),
    ({"worker": ["a:1", "b:1"]}, "chief", 0, "Task type 'chief' is not in the cluster"),
    ({"worker": {1: "a:1"}}, "worker", 0, "Task id 0 of 'worker' is not in the cluster"),
    (
        {"worker": ["a:1", "b:1"]},
        None,
        None,
        "The cluster has 2 tasks, but the task of this process is",
    ),
    ({"worker": ["a:1", "localhost:1"]}, "worker", 0, "worker 1 has the loopback address 'localho"),
    ({"worker": ["127.0.0.1:1", "a:1"]}, "worker", 1, "worker 0 has the loopback address '127"),
    ({"worker": ["a:1"], "ps": ["0.0.0.0:1"]}, "worker", 0, "ps 0 has the loopback address '0."),
    ({"worker": ["a:1", "b"]}, "worker", 0, "Address 'b' is not of the form host:port"),
    ({"chief": ["a:1", "b:1"]}, "chief", 0, "has 2 tasks in job 'chief'"),
    ({"boss": ["a:1"]}, None, None, r"The cluster has unknown jobs \['boss'\]"),
]


@pytest.mark.parametrize(("cluster", "task_type", "task_id"), RIGHT)
def test_cluster_that_can_be_passes(cluster, task_type, task_id) -> None:
    check_cluster(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(("cluster", "task_type", "task_id", "message"), WRONG)
def test_cluster_that_cannot_be_right_is_refused(cluster, task_type, task_id, message) -> None:
    with pytest.raises(ValueError, match=rf"{message}(?s:.)*\nExpected (?s:.)*\nFix: "):
        check_cluster(ClusterSpec(cluster), task_type, task_id)
