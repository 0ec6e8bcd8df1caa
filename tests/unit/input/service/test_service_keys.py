"""Keys of the service: equal in all processes of a run or a user, and no others."""

from __future__ import annotations

import os

import pytest

from stratagem.cluster.addresses import ip_address
from stratagem.group.authentication.secret import new_secret
from stratagem.input.service.address_book import service_keys, tcp_address


@pytest.fixture(autouse=True)
def _folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRATAGEM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("STRATAGEM_SECRET", raising=False)
    monkeypatch.delenv("STRATAGEM_SECRET_FILE", raising=False)


def test_keys_on_one_machine_are_those_of_its_user(tmp_path, monkeypatch) -> None:
    keys = service_keys("tcp://127.0.0.1:5050")
    assert service_keys("localhost:1") == keys
    file = tmp_path / "cache" / "input_service.secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    monkeypatch.setenv("STRATAGEM_CACHE_DIR", str(tmp_path / "other"))
    assert service_keys("127.0.0.1:5050") != keys


def test_a_file_that_others_can_read_is_refused(tmp_path) -> None:
    service_keys("127.0.0.1:1")
    os.chmod(tmp_path / "cache" / "input_service.secret", 0o644)
    with pytest.raises(PermissionError, match="belongs to another user, or others can read it"):
        service_keys("127.0.0.1:1")


@pytest.mark.parametrize("address", ["10.0.0.1:5050", "0.0.0.0:5050"])
def test_other_hosts_need_the_secret_of_the_run(address, monkeypatch) -> None:
    with pytest.raises(ValueError, match="The input service has no secret"):
        service_keys(address)
    monkeypatch.setenv("STRATAGEM_SECRET", new_secret())
    keys = service_keys(address)
    assert service_keys("127.0.0.1:1") == keys
    monkeypatch.setenv("STRATAGEM_SECRET", new_secret())
    assert service_keys(address) != keys


def test_addresses() -> None:
    assert tcp_address("host:1") == tcp_address("grpc://host:1") == "tcp://host:1"
    assert tcp_address("[::1]:2") == "tcp://[::1]:2"
    assert ip_address("127.0.0.1") == ip_address("localhost") == "127.0.0.1"
