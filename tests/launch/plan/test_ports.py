"""Free ports."""

from __future__ import annotations

import socket
import sys

import pytest

from stratagem.launch.plan.ports import free_ports


def test_ports_can_be_listened_on_and_differ() -> None:
    ports = free_ports(50)
    assert len(set(ports)) == 50
    for port in ports:
        with socket.create_server(("127.0.0.1", port)) as server:
            assert server.getsockname()[1] == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address")
@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", ""])
def test_port_in_use_on_any_address_is_not_chosen(monkeypatch, host) -> None:
    """As seen when it is offered all the same."""
    with socket.create_server((host, 0)) as server:
        taken = server.getsockname()[1]

        class Socket(socket.socket):
            def bind(self, address) -> None:
                super().bind((address[0], taken))

        monkeypatch.setattr(socket, "socket", Socket)
        with pytest.raises(OSError, match="in use"):
            free_ports(1)
