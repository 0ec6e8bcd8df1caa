"""A bug report says what matters, and no name, address or secret."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

from stratagem.cli.doctor.command import describe, facts, redacted
from stratagem.cli.doctor.settings import Finding, Level


def test_report_has_versions_devices_settings_and_problems() -> None:
    text = describe(
        {"jax": "0.10.2"},
        [{"platform": "cpu", "kind": "cpu"}] * 2,
        [Finding("a", Level.OK, "fine"), Finding("a", Level.WARNING, "too small", "make it large")],
        {"XLA_FLAGS": "--a=1|2", "EDITOR": "vi", "JAX_PLATFORMS": "cpu"},
    )
    for line in ("| jax | 0.10.2 |", "| devices | 2 x cpu |", "| XLA_FLAGS | --a=1\\|2 |"):
        assert line in text.splitlines()
    assert text.endswith("- warning: too small")
    assert "EDITOR" not in text
    assert "fine" not in text


def test_secrets_are_hidden() -> None:
    variables = {"RAY_AUTH_TOKEN": "s3cret", "STRATAGEM_API_KEY": "s3cret", "KERAS_BACKEND": "jax"}
    text = describe({}, [], [], variables)
    assert "s3cret" not in text
    assert "| RAY_AUTH_TOKEN | (set) |" in text
    assert "| KERAS_BACKEND | jax |" in text


def test_values_for_json_are_redacted_alike() -> None:
    problem = Finding("a", Level.ERROR, f"no {Path.home()}/x at 10.1.2.3", "make it")
    variables = {"KERAS_BACKEND": "jax", "JAX_KEY": "s3cret", "XLA_FLAGS": f"--a={Path.home()}"}
    values = facts(
        {"jax": "0.10.2"}, [{"platform": "gpu", "kind": "H100"}] * 2, [problem], variables
    )
    assert values["versions"] == {"jax": "0.10.2"}
    assert values["devices"] == ["2 x H100 (gpu)"]
    assert values["variables"] == {"JAX_KEY": "(set)", "KERAS_BACKEND": "jax", "XLA_FLAGS": "--a=~"}
    assert values["problems"] == [{"level": "error", "text": "no ~/x at ADDRESS"}]


def test_names_and_addresses_are_hidden() -> None:
    text = (
        f"{Path.home()}/train by {getpass.getuser()} on {socket.gethostname()}, "
        "10.1.2.3:2222, 127.0.0.1:1, jax 0.10.2.1"
    )
    hidden = redacted(text)
    assert str(Path.home()) not in hidden
    assert socket.gethostname() not in hidden
    assert "10.1.2.3" not in hidden
    assert "ADDRESS:2222, 127.0.0.1:1" in hidden
