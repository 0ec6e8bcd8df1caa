"""Unions of resolvers, compared with TensorFlow's."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.process import ProcessClusterResolver
from stratagem.cluster.resolvers.simple import SimpleClusterResolver
from stratagem.cluster.resolvers.union import UnionResolver
from stratagem.cluster.spec import ClusterSpec

# TF 2.21 UnionClusterResolver.cluster_spec: clusters, what they are together.
RECORDED = [
    ([{"worker": ["a:1"]}, {"ps": ["b:1"]}], {"worker": ["a:1"], "ps": ["b:1"]}),
    (
        [{"worker": ["a:1", "b:1"]}, {"worker": ["b:1", "c:1"]}],
        {"worker": ["a:1", "b:1", "b:1", "c:1"]},
    ),
    ([{"worker": {1: "a:1"}}, {"worker": {3: "b:1"}}], {"worker": {1: "a:1", 3: "b:1"}}),
    ([{"worker": ["a:1"]}, {"worker": {1: "b:1"}}], {"worker": ["a:1", "b:1"]}),
    (
        [{"worker": {1: "b:1"}}, {"worker": ["a:1"], "ps": ["c:1"]}],
        {"worker": ["a:1", "b:1"], "ps": ["c:1"]},
    ),
    ([{"worker": ["a:1"]}, {"worker": {0: "b:1"}}], {"worker": ["a:1", "b:1"]}),
    ([{}, {"ps": ["a:1"]}], {"ps": ["a:1"]}),
]


def _union(*clusters, **arguments) -> UnionResolver:
    return UnionResolver(*(SimpleClusterResolver(ClusterSpec(c)) for c in clusters), **arguments)


@pytest.mark.parametrize(("clusters", "together"), RECORDED)
def test_jobs_are_merged_as_in_tensorflow(clusters, together) -> None:
    assert _union(*clusters).cluster_spec().as_dict() == together


@pytest.mark.parametrize(
    "clusters",
    [
        [{"worker": {2: "b:1"}}, {"worker": {2: "c:1"}}],
        [{"worker": ["a:1"]}, {"worker": {0: "b:1", 2: "c:1"}}],
    ],
)
def test_index_that_two_have_is_refused(clusters) -> None:
    with pytest.raises(KeyError, match="of job 'worker', which is sparse in one of them"):
        _union(*clusters).cluster_spec()


def test_job_without_tasks_adds_none() -> None:
    assert _union({"worker": ["a:1"]}, {"worker": []}).cluster_spec() == {"worker": ["a:1"]}


def test_each_fact_is_from_the_first_that_knows_it() -> None:
    spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    union = UnionResolver(
        SimpleClusterResolver(ClusterSpec({}), num_accelerators={"GPU": 1}),
        SimpleClusterResolver(spec, "m:1", "worker", 0, "first", rpc_layer="grpc"),
        SimpleClusterResolver(ClusterSpec({}), "n:1", "ps", 1, "second", {"GPU": 2}, "http"),
    )
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 0, "grpc")
    assert union.environment == "first"
    assert union.num_accelerators() == {"GPU": 1}
    assert union.master() == "grpc://m:1"
    assert union.master("worker", 1) == "grpc://b:1"
    assert union.master("worker", 1, "quic") == "quic://b:1"
    assert union.processes() == Processes(2, 0, "a:1")


def test_arguments_and_settings_win() -> None:
    first = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}), "m:1", "worker", 1)
    union = UnionResolver(first, task_type="chief", task_id=0, rpc_layer="http")
    assert (union.task_type, union.task_id, union.rpc_layer) == ("chief", 0, "http")
    union.task_type, union.task_id, union.rpc_layer = "ps", "2", "grpc"
    assert (union.task_type, union.task_id, union.rpc_layer) == ("ps", 2, "grpc")
    union.task_type = union.task_id = union.rpc_layer = None
    assert (union.task_type, union.task_id, union.rpc_layer) == ("worker", 1, None)


def test_resolvers_that_know_nothing_leave_it_unknown() -> None:
    union = _union({}, {})
    assert (union.task_type, union.task_id, union.rpc_layer) == (None, None, None)
    assert (union.environment, union.master(), union.num_accelerators()) == ("", "", {})


def test_address_that_stands_twice_is_kept_until_processes_are_to_join() -> None:
    union = _union({"worker": ["a:1"]}, {"worker": ["a:1"]}, task_type="worker", task_id=0)
    with pytest.raises(ValueError, match="worker 0 and worker 1 have the same address"):
        union.processes()


def test_other_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="UnionResolver received no resolver"):
        UnionResolver()
    with pytest.raises(
        TypeError, match=r"UnionResolver received \{\}, a dict(?s:.)*instances of Cl"
    ):
        UnionResolver({})
    with pytest.raises(
        ValueError, match=r"UnionResolver received {'job': 1}(?s:.)*correct the keyw"
    ):
        _union({}, job=1)


def test_single_resolver_supplies_facts_missing_in_its_cluster() -> None:
    """Launchers such as torchrun give the number of processes and one address."""
    processes = Processes(4, 2, "10.0.0.1:2222")
    resolver = ProcessClusterResolver(processes)
    assert UnionResolver(resolver).processes() == processes
    with pytest.raises(ValueError, match="Task id 3 of 'worker' is not in the cluster"):
        UnionResolver(resolver, task_id=3).processes()
