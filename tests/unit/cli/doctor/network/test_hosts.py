"""Hosts from a list and from a cluster's description, and malformed lists."""

from __future__ import annotations

import pytest

from stratagem.cli.doctor.network.survey import SurveyedHost, hosts_of, own_index, parse_hosts
from stratagem.cluster.resolvers.simple import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec


def test_entries_have_users_ports_and_brackets() -> None:
    assert parse_hosts("a, user@b,c:2222,[fd00::1]:7,fd00::2") == [
        SurveyedHost("a", "a", None, "a"),
        SurveyedHost("b", "b", None, "user@b"),
        SurveyedHost("c:2222", "c", 2222, "c"),
        SurveyedHost("[fd00::1]:7", "fd00::1", 7, "fd00::1"),
        SurveyedHost("fd00::2", "fd00::2", None, "fd00::2"),
    ]


@pytest.mark.parametrize("text", ["", "a", "a,a", "a:2222,a:2222"])
def test_fewer_than_two_hosts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="two or more different hosts"):
        parse_hosts(text)


def test_port_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="host:port"):
        parse_hosts("a:ssh,b")


def test_tasks_of_a_cluster_are_in_one_order() -> None:
    spec = ClusterSpec({"worker": ["b:1", "c:2"], "chief": ["a:3"]})
    resolver = SimpleClusterResolver(spec, task_type="worker", task_id=1)
    hosts = hosts_of(resolver)
    assert sorted(host.name for host in hosts) == ["chief 0", "worker 0", "worker 1"]
    index = own_index(resolver, hosts)
    assert index is not None
    assert hosts[index] == SurveyedHost("worker 1", "c", 2)


def test_process_without_a_task_has_no_index() -> None:
    resolver = SimpleClusterResolver(ClusterSpec({"worker": ["b:1", "c:2"]}))
    assert own_index(resolver, hosts_of(resolver)) is None
