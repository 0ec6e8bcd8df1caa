"""Addresses at which the processes of a group reach each other.

A process uses the address from which it reached process 0. On process 0's own host that may be a
loopback address: 127.0.0.1, or 127.0.1.1, which Debian puts into /etc/hosts for the host's name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Link:
    """Addresses of a connection between a process and process 0.

    `own` is the process as it sees itself, `source` the process as process 0 sees it, `reached`
    the address of process 0 to which it connected.
    """

    own: str
    source: str
    reached: str

    @staticmethod
    def of(own: str, writer: asyncio.StreamWriter) -> Link:
        """Returns the link of a connection that process 0 has accepted."""
        ends = [writer.get_extra_info(end)[0] for end in ("peername", "sockname")]
        return Link(own, *map(_plain, ends))


def reachable_addresses(links: Sequence[Link]) -> list[str]:
    """Returns the address at which each process listens for others.

    Processes that reached process 0 by loopback run on its host. They get the address by which the
    first process from another host reached it, if any.
    """
    outside = [link.reached for link in links if not _is_loopback(link.reached)]
    return [
        outside[0] if outside and _is_loopback(link.own) and _is_loopback(link.source) else link.own
        for link in links
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _plain(address: str) -> str:
    """Strips the prefix of an IPv4 address that a dual-stack socket accepted."""
    return address.removeprefix("::ffff:")
