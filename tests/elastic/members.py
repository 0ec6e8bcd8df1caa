"""Members of one elastic group in threads of one process, for tests without JAX."""

from __future__ import annotations

import socket

from stratagem.authentication import Credentials
from stratagem.elastic import ElasticGroup
from stratagem.process_group import GroupLimits
from tests.process_group.members import listed, together

LIMITS = GroupLimits(join_s=20, peer_s=2, stuck_s=20, barrier_s=20)


def free_ports(count: int) -> list[int]:
    """Returns unused ports, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def started(count: int, limits: GroupLimits = LIMITS, num_backups: int = 0) -> list[ElasticGroup]:
    """Creates `count` members and waits until all have started."""
    ports = free_ports(count)

    def start(index: int) -> ElasticGroup:
        return ElasticGroup(listed(index, ports), limits, Credentials(), num_backups)

    return together(count, start)
