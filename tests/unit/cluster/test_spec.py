"""Cluster specs: accepted forms, lookups, and errors."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_address_is_found_by_number_and_by_string() -> None:
    spec = ClusterSpec({"worker": {2: "b:1"}})
    assert spec.task_address("worker", 2) == spec.task_address("worker", "2") == "b:1"


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


@pytest.mark.parametrize("ask", ["num_tasks", "task_indices", "job_tasks"])
def test_job_that_is_not_there_is_named_with_those_that_are(ask) -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    with pytest.raises(ValueError, match=r"No such job in cluster: 'ps'(?s:.)*one of \['worker'\]"):
        getattr(spec, ask)("ps")
    with pytest.raises(ValueError, match="No such job in cluster: 'ps'"):
        spec.task_address("ps", 0)


def test_task_that_is_not_there_is_named_with_those_that_are() -> None:
    spec = ClusterSpec({"worker": {0: "a:1", 2: "b:1"}})
    with pytest.raises(ValueError, match=r"No task with index 1 in job 'worker'(?s:.)*\[0, 2\]"):
        spec.task_address("worker", 1)


@pytest.mark.parametrize(("index", "number"), [(3, 3), ("0", 0), (" 12 ", 12), ("007", 7)])
def test_index_is_a_number_or_a_string(index, number) -> None:
    assert parse_task_index(index) == number


@pytest.mark.parametrize("index", ["", "1.0", "-1", "1_0", "²", -3])
def test_other_text_is_no_index(index) -> None:
    with pytest.raises(ValueError, match=r"is invalid\.(?s:.)*number tasks from 0"):
        parse_task_index(index)


def test_notebook_shows_the_tasks() -> None:
    spec = ClusterSpec({"worker": {0: "a:1", 2: "<b>:1"}, "ps": ["c:1"]})
    texts = require_plain(spec._repr_html_()).texts
    heads = ["ClusterSpec", "job", "task", "address"]
    rows = ["ps", "0", "c:1", "worker", "0", "a:1", "worker", "2", "<b>:1"]
    assert texts == [*heads, *rows]


def test_many_tasks_are_counted() -> None:
    html = ClusterSpec({"worker": [f"h{index}:1" for index in range(1000)]})._repr_html_()
    assert "... 968 more" in html
    assert html.count("<tr>") == 34
