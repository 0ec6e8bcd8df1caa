"""Hosts, and what limits the link between them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.slow_links.links import (
    BURST_BYTES,
    LINKS,
    Link,
    TwoHosts,
    parse_counters,
    two_hosts,
)
from tests.multiprocess.namespaces import can_make_hosts

_TABLE = """Inter-|   Receive                     |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs
    lo:     5  1 0 0 0 0 0 0      7  1 0
  eth0: 156163 2346 0 0 0 0 0 0 387920358 6349 0
  tun0:250105 4802 0 0 0 0 0 0 125728452 14001 0
"""
_SIZE_BYTES = 1_000_000
_SERVER = f"""
import socket
server = socket.create_server(("10.79.0.2", 5555))
print("ready", flush=True)
connection, _ = server.accept()
left = {_SIZE_BYTES}
while left:
    left -= len(connection.recv(left))
connection.sendall(b"x")
"""
_CLIENT = f"""
import socket, time
from benchmarks.slow_links.links import sent_bytes
connection = socket.create_connection(("10.79.0.2", 5555))
begin, before = time.monotonic(), sent_bytes()
connection.sendall(b"x" * {_SIZE_BYTES})
connection.recv(1)
print(time.monotonic() - begin, sent_bytes() - before)
"""


def _can_make_links() -> bool:
    if not can_make_hosts() or not Path("/dev/net/tun").exists():
        return False
    try:
        with two_hosts() as hosts:
            hosts.become(LINKS[0])
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def test_counters_of_each_device() -> None:
    assert parse_counters(_TABLE) == {"lo": 7, "eth0": 387920358, "tun0": 125728452}


def test_links_are_those_of_the_issue() -> None:
    assert [(one.rate_bits_per_s, one.round_trip_s) for one in LINKS] == [
        (10e9, 0),
        (1e9, 0),
        (100e6, 0),
        (1e9, 0.05),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not _can_make_links(), reason="needs root, iproute2, its tbf, and tunnels")
def test_a_link_takes_the_time_of_its_rate_and_of_its_delay() -> None:
    with two_hosts(round_trip_s=0.1) as hosts:
        fast = _transfer(hosts, Link("fast", 1e9))
        slow = _transfer(hosts, Link("slow", 10e6))
        far = _transfer(hosts, Link("far", 1e9, 0.1))
    # Lower bounds alone: whatever else this machine does makes it longer. The bucket's content is
    # sent at once.
    assert slow[0] >= 0.9 * 8 * (_SIZE_BYTES - BURST_BYTES) / 10e6
    assert far[0] >= 0.1
    for _, num_bytes in (fast, slow, far):
        assert _SIZE_BYTES < num_bytes < 1.2 * _SIZE_BYTES


def _transfer(hosts: TwoHosts, link: Link) -> tuple[float, int]:
    """Returns the seconds of a transfer, and the bytes that the sender's host has sent."""
    hosts.become(link)
    command = [sys.executable, "-c"]
    root = Path(__file__).parents[3]
    with subprocess.Popen(
        [*hosts.command(1), *command, _SERVER], stdout=subprocess.PIPE, text=True, cwd=root
    ) as server:
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        done = subprocess.run(
            [*hosts.command(0), *command, _CLIENT],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
        )
    seconds, num_bytes = done.stdout.split()
    return float(seconds), int(num_bytes)
