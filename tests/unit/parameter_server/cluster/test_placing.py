"""What servers and workers ask of their machines."""

from __future__ import annotations

import os
import types

import pytest

from stratagem.cluster.spec import ClusterSpec
from stratagem.parameter_server.cluster import coordinated_cluster as placing
from stratagem.parameter_server.cluster.coordinated_cluster import Placing

SPEC = ClusterSpec({"chief": ["a:1"], "ps": ["b:1"], "worker": ["c:1", "d:1"]})


def _with(
    monkeypatch: pytest.MonkeyPatch, resources: dict[str, float], num_machines: int = 2
) -> None:
    nodes = [{"Alive": True}] * num_machines + [{"Alive": False}]
    ray = types.SimpleNamespace(cluster_resources=lambda: resources, nodes=lambda: nodes)
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


def test_cluster_of_this_process_is_spread(monkeypatch) -> None:
    _with(monkeypatch, {"CPU": 16.0})
    found = Placing.now(None, is_own=True)
    assert (found.of_servers(2), found.of_workers(3)) == (None, None)


@pytest.fixture
def six_cores(monkeypatch) -> None:
    for name in ("NPROC", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.usefixtures("six_cores")
def test_processes_on_one_machine_share_its_cores(monkeypatch, is_own) -> None:
    _with(monkeypatch, {"CPU": 6.0}, num_machines=1)
    found = Placing.now(None, is_own=is_own)
    given = [found.threads(count) for count in (1, 2, 4, 8)]
    assert given == [{"NPROC": "6"}, {"NPROC": "3"}, {"NPROC": "1"}, {"NPROC": "1"}]


@pytest.mark.usefixtures("six_cores")
def test_machines_of_a_cluster_are_not_shared(monkeypatch) -> None:
    _with(monkeypatch, {"CPU": 6.0, "chief:0": 1.0})
    assert Placing.now(None, is_own=False).threads(2) == {}
    assert Placing.now(SPEC, is_own=False).threads(2) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("NPROC", "5"),
        ("JAX_NUM_CPU_DEVICES", "2"),
        ("XLA_FLAGS", "--xla_force_host_platform_device_count=2"),
    ],
)
@pytest.mark.usefixtures("six_cores")
def test_threads_are_left_alone_where_others_have_a_say(monkeypatch, name, value) -> None:
    _with(monkeypatch, {"CPU": 6.0}, num_machines=1)
    monkeypatch.setenv(name, value)
    assert Placing.now(None, is_own=True).threads(2) == {}
