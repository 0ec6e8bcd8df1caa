"""Hosts of a survey: from a cluster's description, or from a list of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from stratagem.cluster.addresses import split_address
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.messages import explain


@dataclasses.dataclass(frozen=True)
class SurveyedHost:
    """One host, or one task of a cluster.

    Args:
        name: name in findings, such as "worker 1".
        address: host name or address that the others connect to.
        port: port of its task; None if no cluster is described.
        login: destination of `ssh`.
    """

    name: str
    address: str
    port: int | None = None
    login: str = ""


def hosts_of(resolver: ClusterResolver) -> list[SurveyedHost]:
    """Returns the tasks of a cluster, in one order on all hosts. The first one leads."""
    spec = resolver.cluster_spec()
    return [
        SurveyedHost(f"{job} {index}", *split_address(spec.task_address(job, index)))
        for job in spec.jobs
        for index in spec.task_indices(job)
    ]


def own_index(resolver: ClusterResolver, hosts: Sequence[SurveyedHost]) -> int | None:
    """Returns the index of this process's task; None if it has none."""
    name = f"{resolver.task_type} {resolver.task_id}"
    return next((i for i, host in enumerate(hosts) if host.name == name), None)


def parse_hosts(text: str) -> list[SurveyedHost]:
    """Returns the hosts of `a,user@b,c:2222`.

    Raises:
        ValueError: an entry is malformed, repeated, or the only one.
    """
    hosts = [_parsed(entry.strip()) for entry in text.split(",") if entry.strip()]
    names = [host.name for host in hosts]
    if len(hosts) < 2 or len(set(names)) < len(names):
        raise ValueError(
            explain(
                f"--hosts {text!r} does not name two or more different hosts.",
                expected="names or addresses, separated by commas: a,b,user@c, or with the ports "
                "of the cluster: a:2222,b:2222.",
                fix="name each host once.",
            )
        )
    return hosts


def _parsed(entry: str) -> SurveyedHost:
    target = entry.rpartition("@")[2]
    # More than one colon without brackets is an IPv6 address without a port.
    has_port = ":" in target and (target.count(":") == 1 or "]:" in target)
    address, port = split_address(target) if has_port else (target.strip("[]"), None)
    user = entry[: len(entry) - len(target)]
    return SurveyedHost(target if has_port else address, address, port, user + address)
