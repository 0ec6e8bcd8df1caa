"""Listening sockets at the addresses that a cluster names, and at no others."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import socket
from collections.abc import Collection

from stratagem.cluster.spec import is_loopback

_logger = logging.getLogger(__name__)

_BACKLOG = 256
_ALL_INTERFACES = ""


def listening_sockets(
    host: str, port: int, hosts: Collection[str] = (), *, may_be_everywhere: bool = True
) -> list[socket.socket]:
    """Returns sockets that listen at the addresses of `host`; raises OSError.

    `hosts` are those of the whole cluster, if they are known. If `host` is no address of this
    machine, as behind a Service of Kubernetes, they listen on all interfaces, which is logged, or
    there are none.
    """
    addresses = local_addresses(host, hosts)
    if addresses == [_ALL_INTERFACES]:
        if not may_be_everywhere:
            return []
        _logger.warning(
            "Listening on all interfaces: %s of the cluster is no address of this machine at which "
            "others reach it.",
            host,
        )
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(_listen(address, port)) for address in addresses]
        stack.pop_all()
        return sockets


def local_addresses(host: str, hosts: Collection[str] = ()) -> list[str]:
    """Returns the addresses of this machine that `host` names; [""] for all interfaces."""
    own = [address for address in _resolved(host) if _is_own(address)]
    if is_loopback(host):  # it may have no secret, so whatever the name resolves to
        return [one for one in own if ipaddress.ip_address(one).is_loopback] or ["127.0.0.1"]
    # Debian's /etc/hosts gives a host's own name 127.0.1.1, and others reach it elsewhere.
    if own and all(map(is_loopback, own)):
        is_one_machine = hosts and all(any(map(is_loopback, _resolved(one))) for one in hosts)
        own = own if is_one_machine else []
    return own or [_ALL_INTERFACES]


def _resolved(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _is_own(address: str) -> bool:
    try:
        _listen(address, 0).close()
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    return True


def _listen(address: str, port: int) -> socket.socket:
    if address == _ALL_INTERFACES:
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # IPv6 may be disabled
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
                )
        return socket.create_server(("", port), backlog=_BACKLOG)
    is_v6 = ipaddress.ip_address(address.partition("%")[0]).version == 6
    family = socket.AF_INET6 if is_v6 else socket.AF_INET
    return socket.create_server((address, port), family=family, backlog=_BACKLOG)
