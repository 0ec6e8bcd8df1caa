"""Findings in a terminal: one heading a topic, a fix below each problem, the counts at the end."""

from __future__ import annotations

import pytest

from stratagem.doctor.finding import Finding, Level
from stratagem.doctor.report import show

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
        "1 errors, 1 warnings",
    ]
