"""What servers and workers ask of their machines."""

from __future__ import annotations

import types

import pytest

from stratagem.cluster import ClusterSpec
from stratagem.coordinator import placing
from stratagem.coordinator.placing import Placing

SPEC = ClusterSpec({"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]})


def _with(monkeypatch: pytest.MonkeyPatch, resources: dict[str, float]) -> None:
    ray = types.SimpleNamespace(cluster_resources=lambda: resources)
    monkeypatch.setattr(placing, "load_ray", lambda: ray)


def test_machines_of_tasks_are_for_those(monkeypatch) -> None:
    _with(monkeypatch, {"CPU": 8.0, "chief:0": 1.0})
    found = Placing.now(SPEC, is_own=False)
    assert found.of_servers(1) == [{"ps:0": 1}]
    assert found.of_workers(2) == [{"worker:0": 1}, {"worker:1": 1}]


def test_cluster_of_somebody_else_gives_shares(monkeypatch) -> None:
    _with(monkeypatch, {"CPU": 16.0, "GPU": 5.0})
    found = Placing.now(SPEC, is_own=False)
    assert found.of_servers(2) == [{"CPU": 1}] * 2
    assert found.of_workers(2) == [{"GPU": 2, "CPU": 1}] * 2
    _with(monkeypatch, {"CPU": 2.0})
    small = Placing.now(None, is_own=False)
    assert small.of_servers(2) is None
    assert small.of_workers(2) is None


def test_machines_of_roles_are_for_those(monkeypatch) -> None:
    _with(monkeypatch, {"CPU": 16.0, "GPU": 8.0, "ps": 2.0, "worker": 4.0})
    found = Placing.now(None, is_own=False)
    assert found.of_servers(2) == [{"ps": 1}] * 2
    assert found.of_workers(4) == [{"GPU": 2, "worker": 1}] * 4


def test_cluster_of_this_process_is_spread() -> None:
    found = Placing.now(None, is_own=True)
    assert (found.of_servers(2), found.of_workers(3)) == (None, None)
