"""Base class of resolvers, tested with a minimal subclass."""

from __future__ import annotations

import pytest

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec
from tests.unit.test_rendering import require_plain


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


def test_resolver_that_does_not_know_its_task_cannot_join() -> None:
    with pytest.raises(ValueError, match="the task of this process is unknown"):
        _Resolver().processes()


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
