"""Environment variables with mistakes; bug reports; findings in a terminal."""

from __future__ import annotations

import getpass
import socket
from pathlib import Path

import pytest
from rich.text import Text

from stratagem.cli.doctor.findings import Finding, Level, describe, facts, redacted, show
from stratagem.cli.doctor.machine import check_settings


def _check(variables: dict[str, str], tmp_path: Path) -> list[Finding]:
    return list(check_settings(variables, tmp_path / "keras.json"))


def test_clean_environment_is_fine(tmp_path: Path) -> None:
    variables = {
        "KERAS_BACKEND": "jax",
        "STRATAGEM_PEER_TIMEOUT_S": "5",
        "STRATAGEM_RUN_DIR": "/runs/1",
        "STRATAGEM_WORKERS": "4",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": ".8",
        "NCCL_P2P_DISABLE": "0",
    }
    assert [one.level for one in _check(variables, tmp_path)] == [Level.OK]


@pytest.mark.parametrize(
    ("name", "value", "level", "text", "fix"),
    [
        ("KERAS_BACKEND", "torch", Level.ERROR, "KERAS_BACKEND=torch", "KERAS_BACKEND=jax"),
        (
            "STRATAGEM_PEER_TIMOUT_S",
            "5",
            Level.WARNING,
            "is not a setting",
            "write STRATAGEM_PEER_TIMEOUT_S",
        ),
        ("STRATAGEM_LOG_LEVEL", "loud", Level.ERROR, "not a log level", "Default: auto."),
        ("STRATAGEM_PEER_TIMEOUT_S", "soon", Level.ERROR, "not a time limit", "Default: 30.0"),
        ("XLA_PYTHON_CLIENT_PREALLOCATE", "no", Level.WARNING, "counts as true", "=false"),
        ("NCCL_P2P_DISABLE", "1", Level.WARNING, "through host memory", "unset"),
        ("JAX_DISABLE_JIT", "true", Level.WARNING, "nothing is compiled", "unset"),
        ("TF_FORCE_GPU_ALLOW_GROWTH", "true", Level.NOTE, "has no effect", ""),
    ],
)
def test_mistake_is_named_with_its_fix(name, value, level, text, fix, tmp_path) -> None:
    (finding,) = _check({name: value}, tmp_path)
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("config", "num_notes"),
    [('{"backend": "tensorflow"}', 1), ('{"backend": "jax"}', 0), ("{", 0), ("[]", 0)],
)
def test_other_backend_in_the_configuration_of_keras_is_a_note(config, num_notes, tmp_path) -> None:
    (tmp_path / "keras.json").write_text(config)
    notes = [one for one in _check({}, tmp_path) if one.level is Level.NOTE]
    assert len(notes) == num_notes
    assert len([one for one in _check({"KERAS_BACKEND": "jax"}, tmp_path) if one.fix]) == 0


# A bug report says what matters, and no name, address or secret.


def test_report_has_versions_devices_settings_and_problems() -> None:
    found = [
        Finding("a", Level.OK, "fine"),
        Finding("a", Level.WARNING, "too small", "make it large"),
    ]
    variables = {"XLA_FLAGS": "--a=1|2", "EDITOR": "vi", "JAX_PLATFORMS": "cpu"}
    text = describe(facts({"jax": "0.10.2"}, ["2 x cpu"], found, variables))
    for line in ("| jax | 0.10.2 |", "| devices | 2 x cpu |", "| XLA_FLAGS | --a=1\\|2 |"):
        assert line in text.splitlines()
    assert text.endswith("- warning: too small")
    assert "EDITOR" not in text
    assert "fine" not in text


def test_values_for_json_are_redacted_alike() -> None:
    problem = Finding("a", Level.ERROR, f"no {Path.home()}/x at 10.1.2.3", "make it")
    variables = {"KERAS_BACKEND": "jax", "JAX_KEY": "s3cret", "XLA_FLAGS": f"--a={Path.home()}"}
    variables["RAY_AUTH_TOKEN"] = "s3cret"
    values = facts({"jax": "0.10.2"}, ["2 x H100 (gpu)"], [problem], variables)
    assert values["versions"] == {"jax": "0.10.2"}
    assert values["devices"] == ["2 x H100 (gpu)"]
    shown = {"JAX_KEY": "(set)", "KERAS_BACKEND": "jax", "RAY_AUTH_TOKEN": "(set)"}
    assert values["variables"] == {**shown, "XLA_FLAGS": "--a=~"}
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


# Findings in a terminal: one heading a topic, a fix below each problem, the counts at the end.

_FINDINGS = [
    Finding("machine", Level.OK, "2 cores."),
    Finding("machine", Level.WARNING, "[small] /dev/shm.", "make it large."),
    Finding("cluster", Level.ERROR, "No host.", "add one."),
]


def test_text_has_headings_fixes_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    assert show(iter(_FINDINGS)) == _FINDINGS
    lines = [line.strip(" ✓!✗i-") for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "machine",
        "2 cores.",
        "[small] /dev/shm.",
        "Fix: make it large.",
        "cluster",
        "No host.",
        "Fix: add one.",
        "1 error, 1 warning",
    ]


def test_line_of_a_file_is_not_wrapped(capsys: pytest.CaptureFixture[str]) -> None:
    text = "A long finding. " * 20
    show([Finding("machine", Level.WARNING, text, "a fix. " * 30)])
    lines = capsys.readouterr().out.splitlines()
    assert [len(line) > 200 for line in lines] == [False, True, True, False]


def test_terminal_wraps_a_line_below_its_text(capsys, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    show([Finding("machine", Level.OK, "word " * 20)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(Text.from_ansi(line).plain.rstrip()) for line in lines) <= 40
    assert all(Text.from_ansi(line).plain.startswith("    word") for line in lines[2:-1])
