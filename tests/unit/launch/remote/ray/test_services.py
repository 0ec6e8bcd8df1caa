"""Services of Ray: one that listens and does not answer is silent, and then lost."""

from __future__ import annotations

import http.server
import threading
import time
from collections.abc import Callable

import pytest

from stratagem.cluster import addresses
from stratagem.cluster.addresses import HTTP, free_ports, probe
from stratagem.launch.remote.ray import node_process as module
from stratagem.launch.remote.ray.node_process import Service
from tests.unit.launch.remote.ray.answering import answering, listening


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(addresses, "_PROBE_S", 120.0)
    monkeypatch.setattr(module, "_REFUSED_S", 0.2)
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "1")


@pytest.fixture
def give_up_early(quick, monkeypatch) -> Callable[[], None]:
    """From then on, a service that says nothing is given up after 0.2 s."""
    return lambda: monkeypatch.setattr(addresses, "_PROBE_S", 0.2)


def looks(service: Service, limit_s: float = 120.0) -> bool:
    """Looks until the service is lost."""
    deadline_s = time.monotonic() + limit_s
    while not service.is_lost and time.monotonic() < deadline_s:
        service.look()
        time.sleep(0.05)
    return service.is_lost


def test_answers(give_up_early) -> None:
    refused = f"127.0.0.1:{free_ports(1)[0]}"
    with answering() as there, listening() as stopped:
        assert [probe(one) for one in (there, refused)] == ["there", "refused"]
        give_up_early()
        assert probe(stopped) == "no answer within 0.2 s"
    assert probe("no-such-host.invalid:1") not in ("there", "refused")
    with pytest.raises(ValueError, match="port"):
        probe("no-port")


def test_error_page_is_an_answer() -> None:
    """Ray's dashboard refuses requests without its token."""

    class Refuse(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(401)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refuse) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert probe(f"127.0.0.1:{server.server_address[1]}", HTTP) == "there"
        server.shutdown()


def test_service_that_answers_is_not_lost_and_others_are(give_up_early) -> None:
    with answering() as there, listening() as stopped:
        silent, gone = Service("raylet", stopped), Service("gcs", f"127.0.0.1:{free_ports(1)[0]}")
        assert not looks(Service("raylet", there), limit_s=1.5)
        give_up_early()
        assert looks(silent)
        assert not silent.has_ended
        assert looks(gone)
        assert gone.has_ended


@pytest.mark.slow
def test_service_that_may_still_start_has_more_time(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "3")
    (port,) = free_ports(1)
    service = Service("dashboard", f"127.0.0.1:{port}", has_started=False)
    assert not looks(service, limit_s=1.5)
    with answering(port):
        service.look()
    assert looks(service)
    assert service.has_ended
    late = Service("dashboard", f"127.0.0.1:{port}", has_started=False)
    assert looks(late)
    assert not late.has_ended


def test_service_that_answers_again_in_time_is_not_lost(monkeypatch) -> None:
    with listening() as stopped, monkeypatch.context() as silent:
        silent.setattr(addresses, "_PROBE_S", 0.2)
        service = Service("raylet", stopped)
        service.look()
    with answering(int(stopped.rpartition(":")[2])):
        service.look()
        time.sleep(1.2)
        assert not service.is_lost
