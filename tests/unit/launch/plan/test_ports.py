"""Free ports."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from stratagem.launch.plan import ports as ports_module
from stratagem.launch.plan.ports import free_ports


def test_ports_can_be_listened_on_and_differ() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", ""])
def test_port_in_use_on_any_address_is_not_chosen(monkeypatch, tmp_path, host) -> None:
    """As seen when it is the only one but one."""
    with socket.create_server((host, 0)) as server:
        taken = server.getsockname()[1]
        file = tmp_path / "range"
        file.write_text(f"{taken + 1}\t60999\n")
        monkeypatch.setattr(ports_module, "_RANGE_FILE", file)
        monkeypatch.setattr(ports_module, "_FIRST_PORT", taken)
        (other,) = free_ports(1)
        assert other != taken


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such file")
def test_outgoing_connections_take_none_of_the_ports() -> None:
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if first <= 20_000:
        pytest.skip(f"outgoing connections of this machine have ports from {first} on")
    assert max(free_ports(100)) < first


def test_a_port_that_may_not_be_used_is_an_error(monkeypatch) -> None:
    class Socket(socket.socket):
        def bind(self, address) -> None:
            raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket, "socket", Socket)
    with pytest.raises(PermissionError):
        free_ports(1)


def test_without_the_file_of_the_range_ports_are_free_too(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(ports_module, "_RANGE_FILE", tmp_path / "missing")
    assert 20_000 <= free_ports(1)[0] < 32_768
