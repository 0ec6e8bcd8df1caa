"""Facts of this machine: versions, devices and problems, without those of the cluster."""

from __future__ import annotations

import importlib.metadata
import json
import platform

import pytest

from stratagem.cli.doctor.accelerators import Probe
from stratagem.cli.doctor.network import facts
from stratagem.cli.doctor.network.facts import gather_facts
from stratagem.cli.doctor.settings import Finding, Level

_PROBE = Probe([{"platform": "cpu", "kind": "cpu", "process": 0, "memory_bytes": None}] * 2)


def test_facts_are_json_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "probe_devices", lambda: _PROBE)
    monkeypatch.setenv("JAX_DISABLE_JIT", "true")
    monkeypatch.setenv("TF_CONFIG", "{")
    before = [
        Finding("cluster", Level.ERROR, "Another program.", "End it."),
        Finding("cluster", Level.OK, "Fine."),
    ]
    found = json.loads(json.dumps(gather_facts(before)))
    assert found["devices"] == "2 x cpu"
    assert found["versions"]["Python"] == platform.python_version()
    assert found["versions"]["jaxlib"] == importlib.metadata.version("jaxlib")
    texts = [one["text"] for one in found["findings"]]
    assert texts[0] == "Another program."
    assert any("JAX_DISABLE_JIT" in text for text in texts)
    assert not any("TF_CONFIG" in text or text == "Fine." for text in texts)
