"""Several hosts on one machine: network namespaces, each with an address of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["can_make_hosts", "hosts", "knowing"]


def can_make_hosts() -> bool:
    """Whether this user may make network namespaces here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"sg-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    return made


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def hosts(count: int, network: str = "10.77.0") -> Iterator[list[tuple[list[str], str]]]:
    """Makes hosts that reach each other; returns of each the command to run there and its address.

    The network device of a host is called eth0.
    """
    switch = f"sg-switch-{os.getpid()}"
    names = [f"sg-host-{os.getpid()}-{index}" for index in range(count)]
    made: list[str] = []
    try:
        for name in (switch, *names):
            _ip("netns", "add", name)
            made.append(name)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for index, name in enumerate(names):
            end = f"port{index}"
            _ip("-n", switch, "link", "add", end, "type", "veth", "peer", "eth0", "netns", name)
            _ip("-n", switch, "link", "set", end, "master", "br0", "up")
            _ip("-n", name, "address", "add", f"{network}.{index + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield [
            (["ip", "netns", "exec", name], f"{network}.{index + 1}:2222")
            for index, name in enumerate(names)
        ]
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


@contextmanager
def knowing(host: list[str], name: str, address: str) -> Iterator[None]:
    """Writes a name into /etc/hosts of a host of `hosts`, given the command to run there."""
    folder = Path("/etc/netns") / host[-1]
    folder.mkdir(parents=True)
    (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {name}\n")
    try:
        yield
    finally:
        shutil.rmtree(folder)
