"""Clusters with mistakes: what each resolver says, ports that are taken, hosts that are away."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from stratagem.cli.doctor import clusters
from stratagem.cli.doctor.settings import Level
from stratagem.cluster.detection import ENVIRONMENTS


@pytest.fixture
def port() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def _closed_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _set_cluster(monkeypatch: pytest.MonkeyPatch, workers: list[str], index: object = 0) -> None:
    config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))


def test_no_cluster_is_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    (finding,) = clusters.examine_clusters()
    assert finding.level is Level.OK
    assert finding.text.startswith("No cluster is described by TF_CONFIG")


def test_tf_config_without_its_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", '{"worker": ["a:1", "b:1"]}')
    (finding,) = clusters.examine_clusters()
    assert finding.level is Level.WARNING
    assert "has no key 'cluster'" in finding.text
    assert '{"cluster": {"worker"' in finding.fix


def test_cluster_whose_machines_answer_is_fine(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    own = f"127.0.0.1:{_closed_port()}"
    _set_cluster(monkeypatch, [own, f"127.0.0.1:{port}", f"127.0.0.1:{_closed_port()}"])
    findings = clusters.examine_clusters()
    assert [one.level for one in findings] == [Level.OK] * 3
    assert findings[0].text == ("TF_CONFIG: 3 processes in lockstep, this is worker 0; 3 worker.")
    assert findings[1].text == f"This machine can listen at {own}."
    assert findings[2].text == "All 2 other tasks can be reached."


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ('{"cluster": {"worker": ["a:1"', "TF_CONFIG"),
        ('{"cluster": {"worker": ["a"]}, "task": {"type": "worker", "index": 0}}', "TF_CONFIG"),
        (
            '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 2}}',
            "TF_CONFIG",
        ),
    ],
    ids=["no JSON", "no port", "no such task"],
)
def test_mistake_in_tf_config_is_named(
    config: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", config)
    finding = clusters.examine_clusters()[0]
    assert finding.level is Level.ERROR
    assert finding.text.startswith(text)
    assert finding.fix
    assert "\n" not in finding.fix


def test_port_that_is_taken_is_named(port: int) -> None:
    (finding,) = clusters.check_own_address(f"127.0.0.1:{port}")
    assert finding.level is Level.ERROR
    assert f"Another program uses 127.0.0.1:{port}" in finding.text
    assert str(port) in finding.fix


def test_address_of_another_machine_is_no_own_address() -> None:
    (finding,) = clusters.check_own_address("192.0.2.1:2222")
    assert finding.level is Level.ERROR
    assert "task type and index" in finding.fix


@pytest.mark.parametrize("check", [clusters.check_own_address, None])
def test_host_without_address_is_named(check: object) -> None:
    address = "no-such-host.invalid:2222"
    (finding,) = (
        clusters.check_own_address(address)
        if check is not None
        else clusters.check_peers({"worker 1": address})
    )
    assert finding.level is Level.ERROR
    assert "no-such-host.invalid, has no address" in finding.text


def test_host_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(address: tuple[str, int], limit_s: float) -> None:
        del address
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", wait)
    (finding,) = clusters.check_peers({"worker 3": "10.0.0.9:2222"}, limit_s=0.5)
    assert finding.text == "worker 3 at 10.0.0.9:2222 cannot be reached: no answer within 0.5 s."


def test_many_lost_hosts_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(address: tuple[str, int], limit_s: float) -> None:
        del address, limit_s
        raise OSError(113, "No route to host")

    monkeypatch.setattr(socket, "create_connection", fail)
    findings = clusters.check_peers({f"worker {n}": "10.0.0.9:2222" for n in range(20)})
    assert len(findings) == 9
    assert "No route to host" in findings[0].text
    assert findings[-1].text == "12 more tasks cannot be reached."


def test_second_cluster_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_cluster(monkeypatch, ["127.0.0.1:2222"])
    make = ENVIRONMENTS["TF_CONFIG"]
    findings, resolver = clusters.examine_resolvers({"first": make, "second": make})
    assert resolver is not None
    assert findings[1].text.endswith("It is not used: an earlier one has a cluster.")
