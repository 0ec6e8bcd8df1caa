"""Secret of a run: where it is found, what is refused, and the keys derived from it."""

from __future__ import annotations

import hashlib
import hmac
import os
import warnings
from pathlib import Path

import pytest

from stratagem.group.authentication import secret
from stratagem.group.authentication.secret import (
    Secret,
    find_secret,
    has_ray_token,
    new_secret,
    required_secret,
    with_ray_token,
    with_secret,
)

_TEXT = "a" * 32


@pytest.fixture(autouse=True)
def no_variables(monkeypatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "ALLOW_UNAUTHENTICATED"):
        monkeypatch.delenv(f"STRATAGEM_{name}", raising=False)
    secret._warn_once.cache_clear()


def written(folder: Path, text: str = _TEXT, mode: int = 0o600) -> str:
    path = folder / "run.secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_key_is_an_hmac_of_the_purpose() -> None:
    expected = hmac.new(_TEXT.encode(), b"stratagem 1 group", hashlib.sha256).digest()
    assert Secret(_TEXT).key("group") == expected


def test_keys_differ_by_purpose_and_by_secret() -> None:
    keys = {Secret(text).key(purpose) for text in (_TEXT, "b" * 32) for purpose in "xy"}
    assert len(keys) == 4


def test_no_secret_has_a_key_of_its_own() -> None:
    assert secret.key_of(None, "x") == hmac.new(b"", b"stratagem 1 x", hashlib.sha256).digest()
    assert secret.key_of(Secret(_TEXT), "x") == Secret(_TEXT).key("x")


def test_secret_is_not_printed() -> None:
    assert _TEXT not in repr(Secret(_TEXT))


def test_short_secret_is_refused_without_being_shown() -> None:
    with pytest.raises(ValueError, match="has a secret of 9 characters") as raised:
        Secret("short-one")
    assert "short-one" not in str(raised.value)


def test_new_secrets_are_long_and_differ() -> None:
    assert len({new_secret() for _ in range(3)}) == 3
    assert len(bytes.fromhex(new_secret())) == 32


def test_variable_comes_before_the_file(monkeypatch, tmp_path) -> None:
    assert find_secret() is None
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", written(tmp_path, _TEXT + "\n"))
    found = find_secret()
    assert found is not None
    assert found.variables() == {"STRATAGEM_SECRET": _TEXT}
    monkeypatch.setenv("STRATAGEM_SECRET", "b" * 32)
    found = find_secret()
    assert found is not None
    assert found.variables() == {"STRATAGEM_SECRET": "b" * 32}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o602])
def test_file_that_others_can_read_or_change_is_refused(monkeypatch, tmp_path, mode) -> None:
    path = written(tmp_path, mode=mode)
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", path)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}(?s:.)*Fix: chmod 0600 {path}"):
        find_secret()


def test_file_of_another_user_is_refused(monkeypatch, tmp_path) -> None:
    path = written(tmp_path)
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", path)
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    os.chown(path, 12345, -1)
    with pytest.raises(ValueError, match="belongs to user 12345"):
        find_secret()


def test_missing_file_and_short_file_are_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"none cannot be read: (?s:.)*stratagem secret --file"):
        find_secret()
    monkeypatch.setenv("STRATAGEM_SECRET_FILE", written(tmp_path, "short"))
    with pytest.raises(ValueError, match=r"The file .*run.secret has a secret of 5 characters"):
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
def test_a_token_of_ray_is_made_only_for_processes_that_would_lack_one(
    given, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert with_ray_token(given) == given
    empty = dict.fromkeys(given, " ")
    made = [with_ray_token(empty) for _ in range(2)]
    assert all(has_ray_token(one) and len(one["RAY_AUTH_TOKEN"]) == 64 for one in made)
    assert made[0] != made[1]
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    assert with_ray_token(empty) == empty
