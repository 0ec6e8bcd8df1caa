"""Reachable addresses of the processes of a group."""

from __future__ import annotations

import concurrent.futures

import pytest

from stratagem.group.hub import Link, reachable_addresses
from stratagem.group.member import Group
from stratagem.group.verdict import GroupLimits
from tests.unit.group.process_group.members import connected, free_port, hello, identity, joined

_ITSELF = Link("127.0.0.1", "127.0.0.1", "127.0.0.1")
_AS_DEBIAN = Link("127.0.0.1", "127.0.0.1", "127.0.1.1")
_THERE = Link("10.0.0.7", "10.0.0.7", "10.0.0.1")


@pytest.mark.parametrize(
    ("links", "wanted"),
    [
        ([_ITSELF, _ITSELF], ["127.0.0.1", "127.0.0.1"]),
        ([_ITSELF, _AS_DEBIAN], ["127.0.0.1", "127.0.0.1"]),
        ([_ITSELF, _THERE], ["10.0.0.1", "10.0.0.7"]),
        ([_ITSELF, _THERE, _AS_DEBIAN], ["10.0.0.1", "10.0.0.7", "10.0.0.1"]),
        ([_ITSELF, _AS_DEBIAN, _THERE], ["10.0.0.1", "10.0.0.1", "10.0.0.7"]),
        # On the host of process 0, by its address in the network.
        ([_ITSELF, Link(*["10.0.0.1"] * 3), _THERE], ["10.0.0.1", "10.0.0.1", "10.0.0.7"]),
        # By a tunnel of its own: it is not on the host of process 0.
        ([_ITSELF, Link("127.0.0.1", "10.0.0.9", "10.0.0.1")], ["10.0.0.1", "127.0.0.1"]),
        # Two networks: the first that is heard of.
        ([_ITSELF, _THERE, Link("172.16.0.2", "172.16.0.2", "172.16.0.1")],
         ["10.0.0.1", "10.0.0.7", "172.16.0.2"]),
        ([Link("::1", "::1", "::1"), Link("fd00::7", "fd00::7", "fd00::1")],
         ["fd00::1", "fd00::7"]),
        ([_ITSELF, Link("fe80::7%eth0", "fe80::7%eth0", "fe80::1%eth0")],
         ["fe80::1%eth0", "fe80::7%eth0"]),
        ([_ITSELF, Link("no address", "10.0.0.7", "10.0.0.1")], ["10.0.0.1", "no address"]),
    ],
)  # fmt: skip
def test_process_on_the_host_of_process_0_gets_a_reachable_address(links, wanted) -> None:
    assert reachable_addresses(links) == wanted


def test_group_on_one_host_stays_on_loopback() -> None:
    members = joined(3, GroupLimits(join_s=120))
    try:
        assert [member.own_address for member in members] == ["127.0.0.1"] * 3
    finally:
        for member in members:
            member.abandon()


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.7"])
def test_process_0_keeps_its_address_without_other_hosts(address) -> None:
    port, limits = free_port(), GroupLimits(join_s=120)

    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        joining = [executor.submit(Group, identity(i, 3, port), limits) for i in range(2)]
        with connected(port, hello(2, 3, address=address), claim="member 2"):
            members = [future.result() for future in joining]
            for member in members:
                member.abandon()
    assert [member.own_address for member in members] == ["127.0.0.1"] * 2
