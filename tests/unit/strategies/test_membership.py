"""Who this process is among those that train together."""

from __future__ import annotations

import pytest

import stratagem as sg
from stratagem.cluster.processes import Processes
from stratagem.strategies.membership import identity_of, own_accelerators


def _identity(cluster: dict, task_type: str, task_id: int):
    resolver = sg.cluster_resolver.SimpleClusterResolver(
        sg.ClusterSpec(cluster), task_type=task_type, task_id=task_id
    )
    return identity_of(resolver, resolver.processes())


def test_processes_are_named_by_task_and_address() -> None:
    cluster = {"chief": ["a:1"], "worker": ["b:2", "c:3"], "ps": ["d:4"], "evaluator": ["e:5"]}
    identity = _identity(cluster, "worker", 1)
    assert identity.labels == ("chief (a:1)", "worker 0 (b:2)", "worker 1 (c:3)")
    assert identity.label == "worker 1 (c:3)"
    assert (identity.host, identity.port) == ("a", 1)
    assert identity.addresses == (("a", 1), ("b", 2), ("c", 3))
    assert {"the cluster", "jax", "keras", "Python"} <= identity.same.keys()


@pytest.mark.slow
def test_cluster_of_very_many_is_compared_by_its_hash() -> None:
    def same(last: str) -> tuple[str, ...]:
        cluster = {"worker": [*(f"host-{index}:2222" for index in range(9999)), last]}
        return tuple(_identity(cluster, "worker", index).same["the cluster"] for index in (0, 7))

    here, there = same("a:1"), same("b:1")
    assert here[0] == here[1]
    assert here[0] != there[0]
    assert len(here[0]) < 3000
    assert "host-0:2222" in here[0]


def test_processes_without_addresses_are_numbered() -> None:
    processes = Processes(3, 1, "a:1")
    resolver = sg.cluster.ProcessClusterResolver(processes, "torchrun")
    identity = identity_of(resolver, processes)
    assert identity.labels == ("process 0", "process 1", "process 2")
    assert identity.process_id == 1
    assert (identity.host, identity.addresses) == ("a", ())


def test_processes_of_one_machine_meet_on_loopback() -> None:
    """Whatever the launcher calls the machine, so they need no secret."""
    processes = Processes(3, 1, "a:1", local_process_id=1, num_local_processes=3)
    resolver = sg.cluster.ProcessClusterResolver(processes, "torchrun")
    identity = identity_of(resolver, processes)
    assert (identity.host, identity.port, identity.addresses) == ("127.0.0.1", 1, ())


@pytest.mark.parametrize(
    ("visible", "local", "share"),
    [
        ("0,1,2,3", (0, 2), [0, 1]),
        ("0,1,2,3", (1, 2), [2, 3]),
        ("0,1", (2, 4), None),  # fewer than processes: nothing to deal out
        (None, (1, 2), [1]),
        ("0,1", (0, 1), None),
        ("0,1", (None, None), None),
    ],
)
def test_gpus_of_a_host_are_dealt_out(monkeypatch, visible, local, share) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_accelerators(Processes(4, 1, "a:1", *local)) == share
