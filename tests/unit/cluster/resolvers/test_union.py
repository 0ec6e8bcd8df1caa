"""Unions of resolvers, compared with TensorFlow's."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.simple import (
    ProcessClusterResolver,
    SimpleClusterResolver,
    UnionResolver,
)
from stratagem.cluster.spec import ClusterSpec
from tests.unit.test_rendering import require_plain

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
    ([{"worker": ["a:1"]}, {"worker": []}], {"worker": ["a:1"]}),
    ([{}, {}], {}),
]


def _union(*clusters, **arguments) -> UnionResolver:
    return UnionResolver(*(SimpleClusterResolver(ClusterSpec(c)) for c in clusters), **arguments)


@pytest.mark.parametrize(("clusters", "together"), RECORDED)
def test_jobs_are_merged_as_in_tensorflow(clusters, together) -> None:
    union = _union(*clusters)
    assert union.cluster_spec().as_dict() == together
    assert (union.task_type, union.task_id, union.rpc_layer) == (None, None, None)
    assert (union.environment, union.master(), union.num_accelerators()) == ("", "", {})


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


_CLASH = "of job 'worker', which is sparse in one of them"


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: UnionResolver(), ValueError, "UnionResolver received no resolver"),
        (lambda: UnionResolver({}), TypeError, r"received \{\}, a dict(?s:.)*instances of Cl"),
        (lambda: _union({}, job=1), ValueError, r"received {'job': 1}(?s:.)*correct the keyw"),
        (
            lambda: _union({"worker": {2: "b:1"}}, {"worker": {2: "c:1"}}).cluster_spec(),
            KeyError,
            _CLASH,
        ),
        (
            lambda: _union({"worker": ["a:1"]}, {"worker": {0: "b:1", 2: "c:1"}}).cluster_spec(),
            KeyError,
            _CLASH,
        ),
        (
            lambda: SimpleClusterResolver({"worker": ["a:1"]}),
            TypeError,
            r"is of type dict(?s:.)*pass sg\.ClusterSpec\(cluster_spec",
        ),
        (
            lambda: SimpleClusterResolver(_SPEC, master=3),
            TypeError,
            r"master=3 is of type int(?s:.)*pass an address",
        ),
        (
            lambda: ProcessClusterResolver((4, 2, "a:1")),
            TypeError,
            r"is of type tuple(?s:.)*an sg.cluster.Processes",
        ),
        (lambda: _Resolver().processes(), ValueError, "the task of this process is unknown"),
    ],
    ids=[
        *("none", "no resolver", "keyword", "task twice", "sparse twice", "no spec", "no address"),
        *("no processes", "no task"),
    ],
)
def test_wrong_arguments_are_refused(make, error, words) -> None:
    with pytest.raises(error, match=words):
        make()


def test_single_resolver_supplies_facts_missing_in_its_cluster() -> None:
    """Launchers such as torchrun give the number of processes and one address."""
    processes = Processes(4, 2, "10.0.0.1:2222")
    resolver = ProcessClusterResolver(processes)
    assert UnionResolver(resolver).processes() == processes
    with pytest.raises(ValueError, match="Task id 3 of 'worker' is not in the cluster"):
        UnionResolver(resolver, task_id=3).processes()


# Base class of resolvers, tested with a minimal subclass.


class _Resolver(ClusterResolver):
    """Like a user's resolver for TensorFlow: two methods, no constructor."""

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({"worker": ["a:1", "b:1"]})

    def master(self, task_type=None, task_id=None, rpc_layer=None) -> str:
        return "a:1"


def test_resolver_needs_its_two_methods() -> None:
    with pytest.raises(TypeError, match="abstract method"):
        ClusterResolver()


def test_facts_are_unknown_until_they_are_set() -> None:
    resolver = _Resolver()
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "worker", "1", "grpc"
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.processes() == Processes(2, 1, "a:1")
    resolver.task_id = None
    assert resolver.task_id is None


def test_accelerators_are_those_of_this_process(variables) -> None:
    resolver = _Resolver()
    resolver.task_type, resolver.task_id = "worker", 1
    variables(CUDA_VISIBLE_DEVICES="0,1,4")
    assert resolver.num_accelerators() == {"GPU": 3}
    assert resolver.num_accelerators("worker", 1, config_proto=object()) == {"GPU": 3}
    assert resolver.num_accelerators("worker", 0) == {}
    variables(CUDA_VISIBLE_DEVICES="")
    assert resolver.num_accelerators() == {}


class _Local(ClusterResolver):
    _is_local = True
    _task_type, _task_id = "worker", 1

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec({"worker": ["a:1", "b:1"]})


class _Asking(_Local):
    _is_local = False

    def cluster_spec(self) -> ClusterSpec:
        raise AssertionError("printing must not send a request")


class _Broken(_Local):
    def cluster_spec(self) -> ClusterSpec:
        raise ValueError("malformed")


def test_resolver_is_shown_without_a_request() -> None:
    assert repr(_Local()) == "_Local(ClusterSpec({'worker': ['a:1', 'b:1']}), task='worker 1')"
    assert require_plain(_Local()._repr_html_()).texts[0] == "_Local: this is worker 1"
    for resolver in (_Asking(), _Broken()):
        assert repr(resolver) == f"{type(resolver).__name__}()"
        assert "is looked up when it is used" in resolver._repr_html_()


# Resolver of a cluster specified by the caller.

_SPEC = ClusterSpec({"worker": ["a:1", "b:1"], "ps": ["c:1"]})


def test_defaults_are_tensorflow_s() -> None:
    resolver = SimpleClusterResolver(_SPEC)
    assert resolver.cluster_spec() is _SPEC
    assert resolver.master() == ""
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == (None, None, None)
    assert resolver.environment == ""
    assert resolver.num_accelerators() == {}


def test_arguments_are_returned() -> None:
    resolver = SimpleClusterResolver(_SPEC, "m:1", "worker", 1, "test", {"GPU": 8}, "grpc")
    assert (resolver.task_type, resolver.task_id, resolver.rpc_layer) == ("worker", 1, "grpc")
    assert resolver.environment == "test"
    assert resolver.num_accelerators("ps", 0) == {"GPU": 8}
    # TF 2.21 SimpleClusterResolver.master.
    assert resolver.master() == "grpc://m:1"
    assert resolver.master("ps", 0) == "grpc://c:1"
    assert resolver.master("worker", 0, rpc_layer="http") == "http://a:1"
    assert resolver.master("worker") == "grpc://m:1"
    assert resolver.processes() == Processes(2, 1, "a:1")
    resolver.task_type, resolver.task_id, resolver.rpc_layer = "ps", 0, None
    assert (resolver.task_type, resolver.task_id) == ("ps", 0)
    assert resolver.master() == "m:1"


# Resolver of a process count, rank and coordinator.


def test_every_process_is_a_worker_and_only_worker_0_has_an_address() -> None:
    processes = Processes(4, 2, "a:1", 0, 2)
    resolver = ProcessClusterResolver(processes, "torchrun")
    assert resolver.processes() is processes
    assert (resolver.task_type, resolver.task_id) == ("worker", 2)
    assert resolver.cluster_spec() == {"worker": {0: "a:1"}}
    assert resolver.environment == "torchrun"
    assert resolver.master() == "a:1"
    assert resolver.master("worker", 0, "grpc") == "grpc://a:1"
    with pytest.raises(ValueError, match="No task with index 2 in job 'worker'"):
        resolver.master("worker", 2)
    alone = ProcessClusterResolver(Processes(1, 0))
    assert (alone.cluster_spec(), alone.master()) == ({}, "")
