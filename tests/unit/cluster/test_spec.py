"""Cluster specs: accepted forms, lookups, and errors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stratagem.cluster.processes import Processes, check_cluster, processes_of_task
from stratagem.cluster.roles import (
    collective_leader,
    id_in_cluster,
    is_chief,
    normalize_cluster_spec,
    task_count,
    worker_count,
)
from stratagem.cluster.spec import ClusterDef, ClusterSpec, JobDef, parse_task_index
from tests.unit.test_rendering import require_plain

# TF 2.21 server_lib.ClusterSpec: given, as_dict(), jobs, {job: (num_tasks, task_indices,
# job_tasks)}, repr(), as_cluster_def().job.
RECORDED = [
    (
        {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
        {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
        ["worker", "ps"],
        {"worker": (2, [0, 1], ["a:1", "b:1"]), "ps": (1, [0], ["c:1"])},
        "ClusterSpec({'ps': ['c:1'], 'worker': ['a:1', 'b:1']})",
        [("ps", {0: "c:1"}), ("worker", {0: "a:1", 1: "b:1"})],
    ),
    (
        {"worker": {0: "a:1", 2: "b:1"}},
        {"worker": {0: "a:1", 2: "b:1"}},
        ["worker"],
        {"worker": (2, [0, 2], ["a:1", None, "b:1"])},
        "ClusterSpec({'worker': {0: 'a:1', 2: 'b:1'}})",
        [("worker", {0: "a:1", 2: "b:1"})],
    ),
    (
        {"worker": {"1": "a:1"}, "chief": ["c:1"]},
        {"worker": {1: "a:1"}, "chief": ["c:1"]},
        ["worker", "chief"],
        {"worker": (1, [1], [None, "a:1"]), "chief": (1, [0], ["c:1"])},
        "ClusterSpec({'chief': ['c:1'], 'worker': {1: 'a:1'}})",
        [("chief", {0: "c:1"}), ("worker", {1: "a:1"})],
    ),
    ({}, {}, [], {}, "ClusterSpec({})", []),
    (
        {"worker": []},
        {"worker": {}},
        ["worker"],
        # TensorFlow's job_tasks raises here.
        {"worker": (0, [], [])},
        "ClusterSpec({'worker': {}})",
        [("worker", {})],
    ),
    (
        {"w": ("a:1",)},
        {"w": ["a:1"]},
        ["w"],
        {"w": (1, [0], ["a:1"])},
        "ClusterSpec({'w': ['a:1']})",
        [("w", {0: "a:1"})],
    ),
]


@pytest.mark.parametrize(("given_", "as_dict", "jobs", "tasks", "shown", "definition"), RECORDED)
def test_spec_answers_as_tensorflow_s(given_, as_dict, jobs, tasks, shown, definition) -> None:
    spec = ClusterSpec(given_)
    assert spec.as_dict() == as_dict
    assert spec.jobs == jobs
    for job, (num_tasks, indices, addresses) in tasks.items():
        assert spec.num_tasks(job) == num_tasks
        assert spec.task_indices(job) == indices
        assert spec.job_tasks(job) == addresses
    assert repr(spec) == shown
    assert bool(spec) == bool(jobs)
    assert [(job.name, job.tasks) for job in spec.as_cluster_def().job] == definition


_JOBS = st.dictionaries(
    st.sampled_from(["chief", "worker", "ps", "evaluator"]),
    st.dictionaries(st.integers(0, 9), st.from_regex(r"[a-z]{1,3}:[1-9]", fullmatch=True)),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=50)
@given(jobs=_JOBS)
def test_every_form_of_a_spec_makes_it_again(jobs) -> None:
    spec = ClusterSpec(jobs)
    for form in (spec, spec.as_dict(), spec.as_cluster_def(), jobs):
        again = ClusterSpec(form)
        assert again == spec
        assert hash(again) == hash(spec)
    for job, tasks in jobs.items():
        assert {i: spec.task_address(job, i) for i in spec.task_indices(job)} == tasks
        assert [a for a in spec.job_tasks(job) if a] == [tasks[i] for i in sorted(tasks)]


def test_specs_are_equal_by_content() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    assert spec == ClusterSpec({"worker": {1: "b:1", 0: "a:1"}})
    assert spec == {"worker": ["a:1", "b:1"]}
    assert spec == {"worker": {0: "a:1", 1: "b:1"}}
    assert spec != ClusterSpec({"worker": ["b:1", "a:1"]})
    assert spec != {"worker": 3}
    assert spec != ["a:1", "b:1"]
    assert ClusterSpec(ClusterDef((JobDef("worker", {0: "a:1", 1: "b:1"}),))) == spec


def test_spec_is_independent_of_its_argument() -> None:
    cluster = {"worker": ["a:1"]}
    spec = ClusterSpec(cluster)
    cluster["worker"].append("b:1")
    spec.as_dict()["worker"] = []
    assert spec.job_tasks("worker") == ["a:1"]


@pytest.mark.parametrize(
    ("cluster", "error", "message"),
    [
        (["a:1"], TypeError, "is of type list(?s:.)*a dict of jobs, a ClusterDef"),
        (None, TypeError, "is of type NoneType(?s:.)*a dict of jobs, a ClusterDef"),
        ({1: ["a:1"]}, TypeError, "Job name 1 is of type int(?s:.)*name the job"),
        ({"worker": "a:1"}, TypeError, "The tasks of job 'worker' are 'a:1', a str"),
        ({"worker": [1]}, TypeError, "The address of task 0 of job 'worker' is 1, a int"),
        ({"worker": [None]}, TypeError, "The address of task 0 of job 'worker' is None"),
        ({"worker": {1.5: "a:1"}}, TypeError, r"Task index 1\.5 is of type float"),
        ({"worker": {True: "a:1"}}, TypeError, r"Task index True is of type bool"),
        ({"worker": {"x": "a:1"}}, ValueError, "Task index 'x' is invalid"),
        ({"worker": {-1: "a:1"}}, ValueError, "Task index -1 is invalid(?s:.)*0 or more"),
        ({"worker": {1: "a:1", "1": "b:1"}}, ValueError, "Task index 1 occurs twice in job 'wor"),
    ],
)
def test_other_things_are_no_cluster(cluster, error, message) -> None:
    with pytest.raises(error, match=message):
        ClusterSpec(cluster)


def test_job_and_task_that_are_not_there_are_named_with_those_that_are() -> None:
    spec = ClusterSpec({"worker": {0: "a:1", 2: "b:1"}})
    words = r"No such job in cluster: 'ps'(?s:.)*one of \['worker'\]"
    for ask in (spec.num_tasks, spec.task_indices, spec.job_tasks):
        with pytest.raises(ValueError, match=words):
            ask("ps")
    with pytest.raises(ValueError, match=words):
        spec.task_address("ps", 0)
    with pytest.raises(ValueError, match=r"No task with index 1 in job 'worker'(?s:.)*\[0, 2\]"):
        spec.task_address("worker", 1)


def test_index_is_a_number_or_a_string() -> None:
    found = [parse_task_index(index) for index in (3, "0", " 12 ", "007")]
    assert found == [3, 0, 12, 7]
    assert ClusterSpec({"worker": {2: "b:1"}}).task_address("worker", "2") == "b:1"
    for index in ("", "1.0", "-1", "1_0", "²", -3):
        with pytest.raises(ValueError, match=r"is invalid\.(?s:.)*number tasks from 0"):
            parse_task_index(index)


def test_notebook_shows_the_tasks_and_counts_many() -> None:
    spec = ClusterSpec({"worker": {0: "a:1", 2: "<b>:1"}, "ps": ["c:1"]})
    texts = require_plain(spec._repr_html_()).texts
    heads = ["ClusterSpec", "job", "task", "address"]
    rows = ["ps", "0", "c:1", "worker", "0", "a:1", "worker", "2", "<b>:1"]
    assert texts == [*heads, *rows]
    html = ClusterSpec({"worker": [f"h{index}:1" for index in range(1000)]})._repr_html_()
    assert "... 968 more" in html
    assert html.count("<tr>") == 34


# Roles and ranks of tasks, compared with TensorFlow's.

_FULL = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"]}
_WORKERS = {"worker": ["b:1", "c:1"]}
_EVALUATED = {"worker": ["b:1"], "evaluator": ["e:1"]}
_CHIEF, _WORKER = "/job:chief/replica:0/task:0", "/job:worker/replica:0/task:0"
_NO = ValueError

# TF 2.21 multi_worker_util: cluster, task type, task id, then is_chief, worker_count, id_in_cluster
# and collective_leader. Where TensorFlow raises KeyError for an evaluator outside of the cluster,
# its worker_count is 1 here.
RECORDED_OF_ROLES = [
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


@pytest.mark.parametrize(("cluster", "task_type", "task_id", "expected"), RECORDED_OF_ROLES)
def test_roles_are_tensorflow_s(cluster, task_type, task_id, expected) -> None:
    for spec in (cluster, ClusterSpec(cluster), ClusterSpec(cluster).as_cluster_def()):
        assert (
            _outcome(is_chief, spec, task_type, task_id),
            _outcome(worker_count, spec, task_type),
            _outcome(id_in_cluster, spec, task_type, task_id),
            _outcome(collective_leader, spec, task_type, task_id),
        ) == expected


def test_spec_is_kept_and_other_forms_become_one() -> None:
    spec = ClusterSpec(_WORKERS)
    assert normalize_cluster_spec(spec) is spec
    assert normalize_cluster_spec(_WORKERS) == spec
    assert [task_count(ClusterSpec(_FULL), job) for job in ("worker", "ps", "evaluator")] == [
        2,
        1,
        0,
    ]
    with pytest.raises(ValueError, match=r"is of type list(?s:.)*a dict, a ClusterDef or a"):
        normalize_cluster_spec(["a:1"])


@pytest.mark.parametrize(
    ("ask", "cluster", "task", "message"),
    [
        (is_chief, {"master": ["a:1"]}, (None, None), r"unknown jobs \['master'\](?s:.)*'chief'"),
        (
            is_chief,
            {"chief": ["a:1", "b:1"]},
            (None, None),
            "has 2 tasks in job 'chief'(?s:.)*at m",
        ),
        (is_chief, {"evaluator": ["a:1", "b:1"]}, (None, None), "has 2 tasks in job 'evaluator'"),
        (is_chief, _WORKERS, ("gpu", 0), "Task type 'gpu' is unknown(?s:.)*correct the type"),
        (is_chief, _WORKERS, ("ps", 0), "Task type 'ps' is not in the cluster"),
        (is_chief, _WORKERS, ("worker", None), "Task type 'worker' was passed without a task id"),
        (is_chief, _WORKERS, ("worker", 2), r"Task id 2 of 'worker' is not (?s:.)*of \[0, 1\]"),
        (is_chief, _WORKERS, ("worker", "x"), "Task index 'x' is invalid"),
        (is_chief, _EVALUATED, ("evaluator", 1), "Task id 1 of 'evaluator' is not in the cluster"),
        (is_chief, _WORKERS, ("evaluator", 1), "Task id 1 of 'evaluator' is not in the cluster"),
        (id_in_cluster, _FULL, ("ps", 0), "A task of type 'ps' has no rank"),
        (worker_count, _FULL, ("ps",), "task_type='ps' does not count as a worker"),
        (collective_leader, {"ps": ["a:1"]}, ("ps", 0), r"neither a chief nor .*jobs \['ps'\]"),
    ],
)
def test_wrong_clusters_are_rejected(ask, cluster, task, message) -> None:
    with pytest.raises(ValueError, match=message):
        ask(cluster, *task)


# Number, rank and coordinator of processes.

_FULL_OF_PROCESSES = {"chief": ["a:1"], "worker": ["b:1", "grpc://c:1"], "ps": ["d:1"]}


def _of_task(cluster, task_type, task_id) -> Processes:
    return processes_of_task(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(
    ("cluster", "task_type", "task_id", "expected"),
    [
        (_FULL_OF_PROCESSES, "chief", 0, Processes(3, 0, "a:1")),
        (_FULL_OF_PROCESSES, "worker", 1, Processes(3, 2, "a:1")),
        (_FULL_OF_PROCESSES, "evaluator", 0, Processes(1, 0)),
        ({"worker": ["grpc://b:1", "c:1"]}, "worker", "1", Processes(2, 1, "b:1")),
        ({"worker": ["b:1"]}, None, None, Processes(1, 0, "b:1")),
        ({"worker": ["b:1"], "chief": []}, "worker", 0, Processes(1, 0, "b:1")),
        ({}, None, None, Processes(1, 0)),
    ],
)
def test_processes_are_the_chief_and_the_workers(cluster, task_type, task_id, expected) -> None:
    assert _of_task(cluster, task_type, task_id) == expected


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (_of_task, (_FULL_OF_PROCESSES, "ps", 0), "A task of type 'ps' has no rank"),
        (
            _of_task,
            ({"worker": {0: "a:1", 2: "b:1"}}, "worker", 0),
            r"The cluster lists only workers \[0, 2\]",
        ),
        (
            _of_task,
            ({"worker": ["a:1", "a:1"]}, "worker", 0),
            "worker 0 and worker 1 have the same address",
        ),
        (Processes, (2, 2, "a:1"), "process_id=2 is out of range for num_processes=2"),
        (Processes, (0, 0), "process_id=0 is out of range for num_processes=0"),
        (
            Processes,
            (2, -1, "a:1"),
            "process_id=-1 is out of range for num_processes=2(?s:.)*number processes from 0",
        ),
        (Processes, (2, 0, "a:1", 1, 1), "local_process_id=1 is out of range for num_local_pro"),
        (Processes, (2, 0), "2 processes have no coordinator_address"),
        (Processes, (2, 0, "a"), "Address 'a' is not of the form host:port"),
    ],
)
def test_processes_that_cannot_be_are_refused(make, arguments, message) -> None:
    with pytest.raises(ValueError, match=message):
        make(*arguments)


# Valid and invalid clusters.

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
    ({"worker": {1: "a:1"}}, "worker", 0, "Task id 0 of 'worker' is not in the cluster"),
    (
        {"worker": ["a:1", "b:1"]},
        None,
        None,
        "The cluster has 2 tasks, but the task of this process is",
    ),
    ({"worker": ["a:1", "localhost:1"]}, "worker", 0, "worker 1 has the address 'localhost:1'"),
    ({"worker": ["127.0.0.1:1", "a:1"]}, "worker", 1, "worker 0 has the address '127"),
    ({"worker": ["a:1"], "ps": ["0.0.0.0:1"]}, "worker", 0, "ps 0 has the address '0."),
    ({"worker": ["a:1", "b"]}, "worker", 0, "Address 'b' is not of the form host:port"),
]


@pytest.mark.parametrize(("cluster", "task_type", "task_id"), RIGHT)
def test_cluster_that_can_be_passes(cluster, task_type, task_id) -> None:
    check_cluster(ClusterSpec(cluster), task_type, task_id)


@pytest.mark.parametrize(("cluster", "task_type", "task_id", "message"), WRONG)
def test_cluster_that_cannot_be_right_is_refused(cluster, task_type, task_id, message) -> None:
    with pytest.raises(ValueError, match=rf"{message}(?s:.)*\nExpected (?s:.)*\nFix: "):
        check_cluster(ClusterSpec(cluster), task_type, task_id)
