"""Two hosts on one machine, and a link between them as slow as asked for.

A host is a network namespace. The kernel's token bucket limits the rate. What delays packets in the
kernel, netem, is often missing; here a program between two tunnel devices holds them back.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import select
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Generator

__all__ = ["BURST_BYTES", "LINKS", "Link", "TwoHosts", "parse_counters", "sent_bytes", "two_hosts"]

_NETWORK = "10.79.0"
_CONTROL_PORT = 2222
_MTU = 9000
# A queue of so long at most; a packet that finds it full is lost.
_QUEUE_S = 0.1
# The bucket must hold a packet of the kernel's offloading, and what flows between two timer ticks.
BURST_BYTES, _TICK_S = 128_000, 0.001
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_LINE = re.compile(r"^\s*(\w+):\s*(.*)$", re.MULTILINE)
_SENT_BYTES_COLUMN = 8


@dataclasses.dataclass(frozen=True)
class Link:
    """A link between two hosts, the same in both directions.

    Args:
        name: in tables.
        rate_bits_per_s: bandwidth of each direction.
        round_trip_s: delay there and back.
    """

    name: str
    rate_bits_per_s: float
    round_trip_s: float = 0.0


LINKS = (
    Link("10 Gbit/s", 10e9),
    Link("1 Gbit/s", 1e9),
    Link("100 Mbit/s", 100e6),
    Link("1 Gbit/s, 50 ms", 1e9, 0.05),
)


def parse_counters(table: str) -> dict[str, int]:
    """Returns the bytes that each network device has sent, from the text of /proc/net/dev."""
    return {
        name: int(numbers.split()[_SENT_BYTES_COLUMN]) for name, numbers in _LINE.findall(table)
    }


def sent_bytes() -> int:
    """Returns the bytes that this host has sent to others, headers included, by the kernel."""
    with open("/proc/net/dev", encoding="ascii") as table:
        return sum(size for name, size in parse_counters(table.read()).items() if name != "lo")


class TwoHosts:
    """Two hosts that reach each other; made by `two_hosts`.

    Args:
        names: of their namespaces.
    """

    def __init__(self, names: tuple[str, str]) -> None:
        self.addresses = [f"{_NETWORK}.{place}:{_CONTROL_PORT}" for place in (1, 2)]
        self._names = names

    def command(self, host: int) -> list[str]:
        """Returns what runs a command on a host, on a core of its own: the words before it."""
        core = str(host % (os.cpu_count() or 1))
        # With process ids of its own: processes that see each other's would share memory.
        apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["taskset", "--cpu-list", core, "ip", "netns", "exec", self._names[host], *apart]

    def become(self, link: Link) -> None:
        """Makes the link between the hosts as slow as another one.

        Connections stay, and with them what TCP has learned: for 10 s, BBR (a way of Linux to
        control congestion) sends no more than fits the shortest round trip that it remembers.
        """
        device = "tun0" if link.round_trip_s else "eth0"
        burst = max(BURST_BYTES, int(link.rate_bits_per_s / 8 * _TICK_S))
        limit = max(2 * burst, int(link.rate_bits_per_s / 8 * _QUEUE_S))
        rate = f"{link.rate_bits_per_s / 1e6:.0f}mbit"
        bucket = ["rate", rate, "burst", str(burst), "limit", str(limit)]
        for place, name in enumerate(self._names):
            other = f"{_NETWORK}.{2 - place}/32"
            _run("tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *bucket)
            _run("ip", "-n", name, "route", "replace", other, "dev", device)


@contextlib.contextmanager
def two_hosts(round_trip_s: float = 0.05) -> Generator[TwoHosts]:
    """Makes two hosts. Needs root and iproute2.

    Args:
        round_trip_s: delay of those links that have one.
    """
    names = (f"sg-link-{os.getpid()}-0", f"sg-link-{os.getpid()}-1")
    made: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [_run("ip", "netns", "delete", name) for name in made])
        for name in names:
            _run("ip", "netns", "add", name)
            made.append(name)
        first, second = names
        peer = ["type", "veth", "peer", "eth0", "netns", second]
        _run("ip", "-n", first, "link", "add", "eth0", *peer)
        tunnels = [_open_tunnel(name, stack) for name in names]
        for place, name in enumerate(names):
            _run("ip", "-n", name, "address", "add", f"{_NETWORK}.{place + 1}/24", "dev", "eth0")
            for device in ("eth0", "tun0"):
                _run("ip", "-n", name, "link", "set", device, "mtu", str(_MTU), "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
        stack.enter_context(_delaying(tunnels, round_trip_s / 2))
        yield TwoHosts(names)


def _open_tunnel(name: str, stack: contextlib.ExitStack) -> int:
    """Opens a tunnel device and moves it to a host as tun0."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    stack.callback(os.close, file)
    asked = fcntl.ioctl(file, _TUNSETIFF, struct.pack("16sH14x", b"sg%d", _IFF_TUN | _IFF_NO_PI))
    device = asked[:16].rstrip(b"\0").decode()
    _run("ip", "link", "set", device, "netns", name)
    _run("ip", "-n", name, "link", "set", device, "name", "tun0")
    return file


@contextlib.contextmanager
def _delaying(tunnels: list[int], delay_s: float) -> Generator[None]:
    """Carries packets from each tunnel to the other, later."""
    ending = threading.Event()
    thread = threading.Thread(target=_carry, args=(tunnels, delay_s, ending), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ending.set()
        thread.join()


def _carry(tunnels: list[int], delay_s: float, ending: threading.Event) -> None:
    waiting: deque[tuple[float, int, bytes]] = deque()
    targets = dict(zip(tunnels, reversed(tunnels), strict=True))
    while not ending.is_set():
        pause_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.2
        ready, _, _ = select.select(tunnels, [], [], pause_s)
        for file in ready:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(file, _MTU)
                    waiting.append((time.monotonic() + delay_s, targets[file], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, target, packet = waiting.popleft()
            # A full device loses a packet, as any other.
            with contextlib.suppress(BlockingIOError):
                os.write(target, packet)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)
