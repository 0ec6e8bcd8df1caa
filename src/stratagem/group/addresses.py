"""The addresses by which the processes of a group reach one another.

A process knows the address from which it reached process 0. For those on the host of process 0
that may be a loopback address, which no other host can reach: 127.0.0.1, or 127.0.1.1, as Debian
writes it into /etc/hosts for the host's own name.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
from collections.abc import Sequence

__all__ = ["Link", "reachable_addresses"]


@dataclasses.dataclass(frozen=True)
class Link:
    """The two ends of a connection of a process to process 0.

    Args:
        own: address of the process, as it sees it.
        source: where it came from, as process 0 sees it.
        reached: address of process 0's host that it came to.
    """

    own: str
    source: str
    reached: str

    @staticmethod
    def of(own: str, writer: asyncio.StreamWriter) -> Link:
        """Returns the link of a connection that process 0 has accepted.

        Args:
            own: address of the process, as it sees it.
            writer: of the connection.
        """
        ends = [writer.get_extra_info(end)[0] for end in ("peername", "sockname")]
        return Link(own, *map(_plain, ends))


def reachable_addresses(links: Sequence[Link]) -> list[str]:
    """Returns where each process listens for the others.

    Args:
        links: of all processes, in their order.

    Returns:
        For each its own address; for those that came to process 0 by loopback, and so are on its
        host, the address by which the first that did not come so reached it, if one did.
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
    """An IPv4 address as such, also where a socket for both kinds accepted it."""
    return address.removeprefix("::ffff:")
