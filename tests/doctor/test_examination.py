"""The whole examination of this machine, and its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.doctor.accelerators import Probe
from stratagem.doctor.examination import examine
from stratagem.doctor.finding import Level

_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}])


def test_every_topic_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    script = tmp_path / "train.py"
    script.write_text("import stratagem\n")
    findings = list(examine(script, _PROBE))
    topics = list(dict.fromkeys(one.topic for one in findings))
    assert topics == ["versions", "settings", "script", "machine", "devices", "cluster"]


def test_problems_of_the_environment_appear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "tensorflow")
    monkeypatch.setenv("TF_CONFIG", "{")
    errors = {one.topic for one in examine(probe=_PROBE) if one.level is Level.ERROR}
    assert {"settings", "cluster"} <= errors
