"""The whole examination of this machine, and its order."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.cli.doctor import examination
from stratagem.cli.doctor.accelerators import Probe
from stratagem.cli.doctor.examination import examine, variables_of_user
from stratagem.cli.doctor.settings import Level

_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}])


def test_every_topic_is_examined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
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


def test_survey_of_a_cluster_leaves_the_cluster_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{")
    assert not any(one.topic == "cluster" for one in examine(probe=_PROBE, has_cluster=False))


@pytest.mark.parametrize(
    ("initial", "backend", "expected"),
    [
        (b"PATH=/bin\0", "jax", None),
        (b"PATH=/bin\0KERAS_BACKEND=jax\0", "jax", "jax"),
        (b"PATH=/bin\0", "torch", "torch"),
    ],
    ids=["selected by the import", "selected by the user", "set later"],
)
def test_backend_that_the_import_selected_is_not_the_users(
    initial: bytes,
    backend: str,
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "environ").write_bytes(initial)
    monkeypatch.setattr(examination, "_INITIAL_VARIABLES", tmp_path / "environ")
    monkeypatch.setenv("KERAS_BACKEND", backend)
    assert variables_of_user().get("KERAS_BACKEND") == expected
