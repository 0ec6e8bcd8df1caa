"""Clusters that a strategy with parameter servers refuses before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest

import stratagem as sg
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.parameter_server.cluster.cluster_plan import checked_cluster

_JOBS: dict[str, list[str]] = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


def _simple(jobs: dict[str, Any], task: tuple[str, int] | None) -> ClusterResolver:
    task_type, task_id = task or (None, None)
    return sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(jobs), task_type=task_type, task_id=task_id
    )


def _union(jobs: dict[str, Any], task: tuple[str, int] | None) -> ClusterResolver:
    return sg.cluster_resolver.UnionResolver(_simple(jobs, task))


_STRANGE = [
    pytest.param(
        {**_JOBS, "some_name": ["d:1"]},
        ("chief", 0),
        r"has unknown jobs \['some_name'\]",
        id="job of another name",
    ),
    pytest.param(
        {**_JOBS, "chief": ["a:1", "a:2", "a:3"]},
        ("chief", 1),
        "has 3 tasks in job 'chief'",
        id="three chiefs",
    ),
    pytest.param(
        {**_JOBS, "evaluator": ["d:1", "e:1"]},
        ("chief", 0),
        "has 2 tasks in job 'evaluator'",
        id="two evaluators",
    ),
    pytest.param(_JOBS, ("foobar", 0), "Task type 'foobar' is unknown", id="task type"),
    pytest.param(
        _JOBS, ("worker", 1), "Task id 1 of 'worker' is not in the cluster", id="task index"
    ),
    pytest.param(
        {**_JOBS, "worker": []}, ("ps", 0), "has 1 ps and 0 worker tasks", id="no worker, as a ps"
    ),
    pytest.param(
        {**_JOBS, "ps": []}, ("worker", 0), "has 0 ps and 1 worker tasks", id="no ps, as a worker"
    ),
    pytest.param(
        {**_JOBS, "ps": ["b:1"]}, ("chief", 0), "have the same address 'b:1'", id="one address"
    ),
    pytest.param({**_JOBS, "ps": ["c"]}, ("chief", 0), "not of the form host:port", id="no port"),
]


@pytest.mark.parametrize("make", [_simple, _union], ids=["simple", "union"])
@pytest.mark.parametrize(("jobs", "task", "message"), _STRANGE)
def test_clusters_that_cannot_be_are_refused_at_once(make, jobs, task, message) -> None:
    with pytest.raises(ValueError, match=message):
        sg.ParameterServerStrategy(make(jobs, task))


@pytest.mark.parametrize(("jobs", "task", "message"), _STRANGE)
def test_clusters_of_the_environment_are_refused_likewise(monkeypatch, jobs, task, message) -> None:
    config = {"cluster": jobs, "task": {"type": task[0], "index": task[1]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with pytest.raises(ValueError, match=message if task != ("worker", 1) else "worker"):
        sg.ParameterServerStrategy()


@pytest.mark.parametrize(
    "resolver",
    [
        sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec({})),
        sg.cluster_resolver.UnionResolver(
            sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec({}))
        ),
        sg.cluster_resolver.TFConfigClusterResolver(),
    ],
    ids=lambda one: type(one).__name__,
)
@pytest.mark.parametrize("strategy", ["ParameterServerStrategy", "HybridStrategy"])
def test_a_resolver_with_an_empty_cluster_is_refused(resolver, strategy) -> None:
    options = {"placement": {"embedding": "server"}} if strategy == "HybridStrategy" else {}
    with pytest.raises(ValueError, match=f"of {strategy} has an empty cluster"):
        getattr(sg, strategy)(cluster_resolver=resolver, **options)


def test_a_chief_needs_no_index_and_no_resolver_is_this_machine() -> None:
    resolver = sg.cluster_resolver.SimpleClusterResolver(sg.ClusterSpec(_JOBS), task_type="chief")
    assert checked_cluster(resolver, "a test")[1] == _JOBS
    assert not checked_cluster(None, "a test")[1]


@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("task", ["chief", "ps"])
@pytest.mark.parametrize(("name", "job"), [("num_workers", "worker"), ("num_servers", "ps")])
def test_numbers_are_for_no_cluster(independent, task, name, job) -> None:
    options: dict[str, Any] = {name: 2}
    with pytest.raises(ValueError, match=f"{name}=2 was passed for a cluster with 1 {job} tasks"):
        sg.ParameterServerStrategy(_simple(_JOBS, (task, 0)), independent=independent, **options)
