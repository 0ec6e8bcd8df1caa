"""Resolver of a cluster specified by the caller."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.simple import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec

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


def test_other_types_are_refused() -> None:
    with pytest.raises(
        TypeError, match=r"is of type dict(?s:.)*pass sg\.ClusterSpec\(cluster_spec"
    ):
        SimpleClusterResolver({"worker": ["a:1"]})
    with pytest.raises(TypeError, match=r"master=3 is of type int(?s:.)*pass an address"):
        SimpleClusterResolver(_SPEC, master=3)


def test_task_that_is_not_there_has_no_master() -> None:
    with pytest.raises(ValueError, match="No task with index 2 in job 'worker'"):
        SimpleClusterResolver(_SPEC).master("worker", 2)
