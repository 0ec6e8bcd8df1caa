"""Parsing of addresses, and detection of loopback addresses."""

from __future__ import annotations

import pytest

from stratagem.cluster.addresses import is_loopback, join_address, split_address


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("host:1", ("host", 1)),
        ("grpc://Host.Example:65535", ("host.example", 65535)),
        ("10.0.0.1:2222", ("10.0.0.1", 2222)),
        ("[fd00::1]:2222", ("fd00::1", 2222)),
    ],
)
def test_address_has_a_host_and_a_port(address, parts) -> None:
    assert split_address(address) == parts
    assert split_address(join_address(*parts)) == parts


@pytest.mark.parametrize(
    "address", ["", "host", "host:", ":1", "host:0", "host:65536", "host:x", "fd00::1:1", "[]:1"]
)
def test_other_text_is_no_address(address) -> None:
    with pytest.raises(ValueError, match=r"is not of the form host:port(?s:.)*in brackets"):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("localhost", "127.0.0.1", "127.0.1.1", "::1", "0.0.0.0")),
        *((host, False) for host in ("10.0.0.1", "fd00::1", "localhost.example.com", "127")),
    ],
)
def test_loopback_is_known(host, expected) -> None:
    assert is_loopback(host) is expected
