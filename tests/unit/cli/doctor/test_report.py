"""Findings in a terminal: one heading a topic, a fix below each problem, the counts at the end."""

from __future__ import annotations

import pytest
from rich.text import Text

from stratagem.cli.doctor.cluster_command import show
from stratagem.cli.doctor.settings import Finding, Level

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


def test_terminal_wraps_a_line_below_its_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    show([Finding("machine", Level.OK, "word " * 20)])
    lines = capsys.readouterr().out.splitlines()
    assert max(len(Text.from_ansi(line).plain.rstrip()) for line in lines) <= 40
    assert all(Text.from_ansi(line).plain.startswith("    word") for line in lines[2:-1])
