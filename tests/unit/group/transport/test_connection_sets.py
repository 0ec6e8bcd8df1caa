"""Connections that no thread uses, and those of one thread."""

from __future__ import annotations

import resource

import pytest
import zmq

from stratagem.group.transport.connection import ConnectionPool, ConnectionSet
from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.server_connections import Peer

_ABSENT = "tcp://127.0.0.1:1"


def test_pool_has_more_connections_than_zeromq_has_sockets_by_default() -> None:
    num_servers = zmq.Context.instance().max_sockets + 1
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * num_servers
    if hard < needed:
        pytest.skip(f"the limit of open files is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, needed), hard))
    pool = ConnectionPool(ClusterKeys.make(), [Peer("Server", _ABSENT)] * num_servers)
    try:
        for server in range(num_servers):
            pool.give_back(server, pool.take(server))
    finally:
        pool.close()
        pool.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_released_connection_is_used_again_for_its_server() -> None:
    pool = ConnectionPool(
        ClusterKeys.make(), [Peer("Server 0", _ABSENT), Peer("Server 1", _ABSENT)]
    )
    first, second = ConnectionSet(pool), ConnectionSet(pool)
    to_0, to_1 = first.to(0), first.to(1)
    assert first.to(0) is to_0
    assert second.to(0) is not to_0
    first.release()
    assert second.to(1) is to_1
    assert first.to(0) is to_0
    for one in (first, second):
        one.close()
    pool.close()
    pool.end()
