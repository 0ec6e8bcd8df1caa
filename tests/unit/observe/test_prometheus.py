"""Metrics as Prometheus reads them."""

from __future__ import annotations

import hmac
import math
import socket
import urllib.error
import urllib.request

import pytest

from stratagem import environment as optional_libraries
from stratagem.cli import main
from stratagem.cli import runs as prometheus_export
from stratagem.cli.runs import RunCollector, serve
from stratagem.observe.events import encode
from stratagem.observe.run_state import Watcher
from tests.command_runner import CliRunner
from tests.unit.observe.runs import (
    EPOCH_S,
    members_come_and_go,
    process,
    progress,
    run,
    straggling,
    write,
)

client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name.removeprefix("stratagem_"), *sample.labels.values()): sample.value
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(watcher: Watcher) -> dict[tuple[str, ...], float]:
    registry = client.CollectorRegistry()
    registry.register(RunCollector(watcher))
    return samples(client.generate_latest(registry).decode())


def test_metrics_are_those_of_the_run(tmp_path) -> None:
    write(tmp_path, straggling())
    found = scraped(Watcher(tmp_path, clock=lambda: EPOCH_S + 41))
    assert found["step",] == found["total_steps",] == 101
    assert found["metric", "loss"] == 1.0
    assert found["processes", "finished"] == 2
    assert found["processes", "lost"] == 0
    assert found["waited_for_seconds", "unknown", "worker 1"] == pytest.approx(0.2)
    assert ("waited_for_seconds", "unknown", "worker 0") not in found
    assert ("members",) not in found
    assert found["host_memory_bytes", "worker 0"] == 300 * 1024**2
    assert found["time_seconds", "starting"] == pytest.approx(10)
    assert found["goodput_with_startup_ratio",] < found["goodput_after_startup_ratio",] <= 1


def test_members_of_a_group_are_metrics(tmp_path) -> None:
    write(tmp_path, members_come_and_go())
    found = scraped(Watcher(tmp_path, clock=lambda: EPOCH_S + 62))
    assert (found["members",], found["expected_members",]) == (3, 3)
    assert found["time_seconds", "members lost"] == pytest.approx(2.5)


def test_each_scrape_reads_what_is_new(tmp_path) -> None:
    watcher = Watcher(tmp_path)
    assert ("step",) not in scraped(watcher)
    write(tmp_path, run(process("worker 0", 0)))
    assert scraped(watcher)["processes", "lost"] == 1
    with (tmp_path / "events" / "worker-0.0.jsonl").open("a") as file:
        file.write(encode(progress(5, 7, loss=None)) + "\n")
    found = scraped(watcher)
    assert found["step",] == 7
    assert math.isnan(found["metric", "loss"])


def status(port: int, host: str, **headers: str) -> int:
    request = urllib.request.Request(f"http://{host}:{port}/metrics", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_metrics_are_served_on_loopback_only_by_default(tmp_path) -> None:
    write(tmp_path, straggling())
    port, stop = serve(Watcher(tmp_path), 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            assert samples(answer.read().decode())["step",] == 101
        with pytest.raises(urllib.error.URLError, match="refused"):
            status(port, "127.0.0.2")
    finally:
        stop()


def test_scrape_needs_the_token_if_there_is_a_secret(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_SECRET", "s" * 32)
    token = hmac.new(b"s" * 32, b"stratagem 1 telemetry", "sha256").hexdigest()
    assert CliRunner().invoke(main, ["secret", "--telemetry"]).output == f"{token}\n"
    port, stop = serve(Watcher(tmp_path), 0, "127.0.0.1")
    try:
        assert status(port, "127.0.0.1") == 401
        assert status(port, "127.0.0.1", Authorization=f"Bearer {token[:-1]}") == 401
        assert status(port, "127.0.0.1", Authorization=f"Bearer {token}") == 200
    finally:
        stop()


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::"])
def test_other_addresses_need_a_secret(host, tmp_path, monkeypatch) -> None:
    for name in ("SECRET", "SECRET_FILE", "ALLOW_UNAUTHENTICATED"):
        monkeypatch.delenv(f"STRATAGEM_{name}", raising=False)
    with pytest.raises(ValueError, match="The export to Prometheus has no secret"):
        serve(Watcher(tmp_path), 0, host)


@pytest.mark.slow
def test_idle_connection_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(prometheus_export, "_IDLE_S", 0.5)
    port, stop = serve(Watcher(tmp_path), 0)
    try:
        with socket.create_connection(("127.0.0.1", port), 20) as idle:
            assert idle.recv(1) == b""
        assert status(port, "127.0.0.1") == 200
    finally:
        stop()


def test_missing_library_is_named(tmp_path, monkeypatch) -> None:
    def without(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(optional_libraries, "importlib", type("", (), {"import_module": without}))
    with pytest.raises(ImportError, match=r"(?s)Prometheus needs.*stratagem\[observe\]"):
        serve(Watcher(tmp_path), 0)
