"""Credentials: certificates of the settings, and keys."""

from __future__ import annotations

import pytest

from stratagem.group.authentication.secret import PLAIN, TLS, Certificates, Credentials, Secret
from tests.unit.group.authentication import peers
from tests.unit.group.authentication.certificates import make_certificates


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    monkeypatch.delenv("STRATAGEM_TLS_DIR", raising=False)


def test_keys_are_those_of_the_secret() -> None:
    assert Credentials().key("group") == peers.key("group")
    assert Credentials(Secret("a" * 32)).key("group") == peers.key("group", "a" * 32)


def test_no_certificates_are_found_without_settings() -> None:
    assert Certificates.find() is None
    assert Credentials().mode == PLAIN


def test_certificates_are_required_of_both_sides(monkeypatch, tmp_path) -> None:
    for name, text in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, text)
    found = Credentials.find("worker 0", ["127.0.0.1"])
    assert found.mode == TLS
    assert found.certificates is not None
    for context in (found.certificates.client, found.certificates.server):
        assert context.verify_mode.name == "CERT_REQUIRED"
        assert context.minimum_version.name == "TLSv1_3"


def test_missing_and_invalid_files_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRATAGEM_TLS_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=r"TLS cannot be set up with STRATAGEM_TLS_DIR=.*No such"):
        Certificates.find()
    make_certificates(tmp_path)
    (tmp_path / "tls.crt").write_text("no certificate")
    with pytest.raises(ValueError, match=r"TLS cannot be set up(?s:.)*unset the variable"):
        Certificates.find()
