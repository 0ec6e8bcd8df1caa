"""Roles and ranks of tasks, compared with TensorFlow's."""

from __future__ import annotations

import pytest

from stratagem.cluster.roles import (
    collective_leader,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    task_count,
    worker_count,
)
from stratagem.cluster.spec import ClusterSpec

_FULL = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
_WORKERS = {"worker": ["b:1", "c:1"]}
_EVALUATED = {"worker": ["b:1"], "evaluator": ["e:1"]}
_CHIEF, _WORKER = "/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0"
_NO = ValueError

# TF 2.21 multi_worker_util: cluster, task type, task id, then is_chief, worker_count, id_in_cluster
# and collective_leader. Where TensorFlow raises KeyError for an evaluator outside of the cluster,
# its worker_count is 1 here.
RECORDED = [
    (_FULL, "chief", 0, (True, 3, 0, _CHIEF)),
    (_FULL, "worker", 0, (False, 3, 1, _CHIEF)),
    (_FULL, "worker", 1, (False, 3, 2, _CHIEF)),
    (_FULL, "worker", 2, (_NO, 3, _NO, _NO)),
    (_FULL, "ps", 0, (False, _NO, _NO, _CHIEF)),
    (_FULL, "evaluator", 0, (True, 1, 0, "")),
    (_FULL, None, None, (False, _NO, _NO, _CHIEF)),
    (_FULL, "gpu", 0, (_NO, _NO, _NO, _NO)),
    (_WORKERS, "chief", 0, (_NO, _NO, _NO, _NO)),
    (_WORKERS, "worker", 0, (True, 2, 0, _WORKER)),
    (_WORKERS, "worker", 1, (False, 2, 1, _WORKER)),
    (_WORKERS, "ps", 0, (_NO, _NO, _NO, _NO)),
    (_WORKERS, "evaluator", 0, (True, 1, 0, "")),
    (_WORKERS, None, None, (False, _NO, _NO, _WORKER)),
    (_EVALUATED, "worker", 0, (True, 1, 0, _WORKER)),
    (_EVALUATED, "worker", 1, (_NO, 1, _NO, _NO)),
    (_EVALUATED, "evaluator", 0, (True, 1, 0, "")),
    ({"chief": ["a:1", "b:1"]}, "chief", 0, (_NO, _NO, _NO, _NO)),
    ({"evaluator": ["a:1", "b:1"]}, "evaluator", 0, (_NO, _NO, _NO, _NO)),
    ({"master": ["a:1"]}, None, None, (_NO, _NO, _NO, _NO)),
    ({}, "worker", 0, (_NO, _NO, _NO, "")),
    ({}, "evaluator", 0, (True, 1, 0, "")),
    ({}, None, None, (False, _NO, _NO, "")),
]


def _outcome(function, *arguments) -> object:
    try:
        return function(*arguments)
    except ValueError as error:
        return type(error)


@pytest.mark.parametrize(("cluster", "task_type", "task_id", "expected"), RECORDED)
def test_roles_are_tensorflow_s(cluster, task_type, task_id, expected) -> None:
    for spec in (cluster, ClusterSpec(cluster), ClusterSpec(cluster).as_cluster_def()):
        assert (
            _outcome(is_chief, spec, task_type, task_id),
            _outcome(worker_count, spec, task_type),
            _outcome(id_in_cluster, spec, task_type, task_id),
            _outcome(collective_leader, spec, task_type, task_id),
        ) == expected


def test_index_as_a_string_is_the_same_task() -> None:
    assert is_chief(_WORKERS, "worker", "0")
    assert id_in_cluster(_FULL, "worker", "1") == 2


def test_ids_of_the_workers_are_all_numbers_below_their_count() -> None:
    tasks = [("chief", 0), ("worker", 0), ("worker", 1)]
    ids = [id_in_cluster(_FULL, *task) for task in tasks]
    assert ids == list(range(worker_count(_FULL, "worker")))


def test_sparse_job_has_the_indices_it_has() -> None:
    sparse = {"worker": {0: "a:1", 2: "b:1"}}
    assert id_in_cluster(sparse, "worker", 2) == 2
    with pytest.raises(ValueError, match=r"Task id 1 of 'worker' is not in the cluster"):
        id_in_cluster(sparse, "worker", 1)


def test_tasks_of_a_type_are_counted() -> None:
    spec = ClusterSpec(_FULL)
    assert [task_count(spec, job) for job in ("worker", "ps", "evaluator")] == [2, 1, 0]


def test_spec_is_kept_and_other_forms_become_one() -> None:
    spec = ClusterSpec(_WORKERS)
    assert normalize_cluster_spec(spec) is spec
    assert normalize_cluster_spec(_WORKERS) == spec
    with pytest.raises(ValueError, match=r"is of type list(?s:.)*a dict, a ClusterDef or a"):
        normalize_cluster_spec(["a:1"])


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "message"),
    [
        (
            {"master": ["a:1"]},
            None,
            None,
            r"The cluster has unknown jobs \['master'\](?s:.)*is 'chief'",
        ),
        ({"chief": ["a:1", "b:1"]}, None, None, "has 2 tasks in job 'chief'(?s:.)*at most one"),
        ({"evaluator": ["a:1", "b:1"]}, None, None, "has 2 tasks in job 'evaluator'"),
        (_WORKERS, "gpu", 0, "Task type 'gpu' is unknown(?s:.)*correct the type"),
        (_WORKERS, "ps", 0, "Task type 'ps' is not in the cluster"),
        (_WORKERS, "worker", None, "Task type 'worker' was passed without a task id"),
        (
            _WORKERS,
            "worker",
            2,
            r"Task id 2 of 'worker' is not in the cluster(?s:.)*one of \[0, 1\]",
        ),
        (_WORKERS, "worker", "x", "Task index 'x' is invalid"),
        (_EVALUATED, "evaluator", 1, "Task id 1 of 'evaluator' is not in the cluster"),
        (_WORKERS, "evaluator", 1, "Task id 1 of 'evaluator' is not in the cluster"),
    ],
)
def test_wrong_clusters_are_rejected(cluster, task_type, task_id, message) -> None:
    with pytest.raises(ValueError, match=message):
        is_chief(cluster, task_type, task_id)


def test_parameter_server_has_no_number_among_workers() -> None:
    with pytest.raises(ValueError, match="A task of type 'ps' has no rank"):
        id_in_cluster(_FULL, "ps", 0)
    with pytest.raises(ValueError, match="task_type='ps' does not count as a worker"):
        worker_count(_FULL, "ps")


def test_cluster_of_servers_alone_has_no_leader() -> None:
    with pytest.raises(
        ValueError, match=r"The cluster has neither a chief nor a worker, only the jobs \['ps'\]"
    ):
        collective_leader({"ps": ["a:1"]}, "ps", 0)
