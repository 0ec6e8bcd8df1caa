"""Secret of a run and its keys, certificates of the settings, and what of them is refused."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest

from stratagem.group.authentication import secret
from stratagem.group.authentication.secret import (
    PLAIN,
    TLS,
    Certificates,
    Credentials,
    Secret,
    find_secret,
    has_ray_token,
    required_secret,
    with_ray_token,
    with_secret,
)
from tests.unit.group.authentication import peers
from tests.unit.group.authentication.certificates import make_certificates

_TEXT = "a" * 32


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "ALLOW_UNAUTHENTICATED", "TLS_DIR"):
        monkeypatch.delenv(f"STRATAGEM_{name}", raising=False)
    secret._warn_once.cache_clear()


def written(folder: Path, text: str = _TEXT, mode: int = 0o600) -> str:
    path = folder / "run.secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_keys_are_those_of_the_secret_which_is_not_printed() -> None:
    assert Credentials().key("group") == peers.key("group")
    assert Credentials(Secret(_TEXT)).key("group") == peers.key("group", _TEXT)
    assert _TEXT not in repr(Secret(_TEXT))
    assert (Certificates.find(), Credentials().mode) == (None, PLAIN)
    with pytest.raises(ValueError, match="has a secret of 9 characters") as raised:
        Secret("short-one")
    assert "short-one" not in str(raised.value)


def test_variable_comes_before_the_file(monkeypatch, tmp_path) -> None:
    assert find_secret() is None
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", written(tmp_path, _TEXT + "\n"))
    found = find_secret()
    assert found.variables() == {"STRATAGEM_SECRET": _TEXT}
    monkeypatch.setenv("STRATAGEM_SECRET", "b" * 32)
    found = find_secret()
    assert found.variables() == {"STRATAGEM_SECRET": "b" * 32}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_file_that_others_can_read_or_change_is_refused(monkeypatch, tmp_path, mode) -> None:
    path = written(tmp_path, mode=mode)
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", path)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}(?s:.)*Fix: chmod 0600 {path}"):
        find_secret()


@pytest.mark.parametrize(
    ("text", "owner", "words"),
    [
        (None, None, r"run.secret cannot be read: (?s:.)*stratagem secret --file"),
        ("short", None, r"The file .*run.secret has a secret of 5 characters"),
        (_TEXT, 12345, "belongs to user 12345"),
    ],
    ids=["missing", "short", "another user"],
)
def test_file_that_cannot_be_used_is_named(monkeypatch, tmp_path, text, owner, words) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", str(tmp_path / "run.secret"))
    if text is not None:
        written(tmp_path, text)
    if owner is not None:
        if os.getuid() != 0:
            pytest.skip("only root can give a file away")
        os.chown(tmp_path / "run.secret", owner, -1)
    with pytest.raises(ValueError, match=words):
        find_secret()


@pytest.mark.parametrize("hosts", [[], ["127.0.0.1", "localhost"], ["::1"]])
def test_loopback_needs_no_secret(hosts) -> None:
    assert required_secret("worker 0", hosts) is None


def test_network_needs_a_secret(monkeypatch) -> None:
    hosts = ["127.0.0.1", "host1", "10.0.0.2", "c", "d"]
    with pytest.raises(
        ValueError, match=r"worker 0 has no secret(?s:.)*: 10\.0\.0\.2, c, d and 1 more"
    ):
        required_secret("worker 0", hosts)
    monkeypatch.setenv("STRATAGEM_SECRET", _TEXT)
    assert required_secret("worker 0", hosts) is not None


@pytest.mark.parametrize("by_setting", [True, False])
def test_network_without_a_secret_can_be_allowed_and_warns_once(monkeypatch, by_setting) -> None:
    if by_setting:
        monkeypatch.setenv("STRATAGEM_ALLOW_UNAUTHENTICATED", "1")
    with pytest.warns(UserWarning, match="any program that reaches its ports can join"):
        assert required_secret("w", ["host1"], allow_unauthenticated=not by_setting) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert required_secret("w", ["host1"], allow_unauthenticated=not by_setting) is None


def test_child_processes_get_the_secret_or_a_new_one() -> None:
    for given in ({"STRATAGEM_SECRET": _TEXT}, {"STRATAGEM_SECRET_FILE": "run.secret"}):
        assert with_secret(given) == given
    made = with_secret({"HOME": "/root"})
    assert made["HOME"] == "/root"
    assert made["STRATAGEM_SECRET"] != with_secret({})["STRATAGEM_SECRET"]
    Secret(made["STRATAGEM_SECRET"])


@pytest.mark.parametrize(
    "given",
    [
        {"RAY_AUTH_TOKEN": "t"},
        {"RAY_AUTH_TOKEN_PATH": "file"},
        {"RAY_AUTH_MODE": "disabled"},
        {"RAY_ADDRESS": "head:6379"},
    ],
    ids=lambda given: next(iter(given)),
)
def test_a_token_of_ray_is_made_for_processes_that_lack_one(given, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_ray_token(given) == given
    empty = dict.fromkeys(given, " ")
    made = [with_ray_token(empty) for _ in range(2)]
    assert all(has_ray_token(one) and len(one["RAY_AUTH_TOKEN"]) == 64 for one in made)
    assert made[0] != made[1]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert with_ray_token(empty) == empty


# Certificates.


def test_certificates_are_required_of_both_sides(monkeypatch, tmp_path) -> None:
    for name, text in make_certificates(tmp_path).items():
        monkeypatch.setenv(name, text)
    found = Credentials.find("worker 0", ["127.0.0.1"])
    assert found.mode == TLS
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
