"""Connection to Ray: started here or found, and closed completely."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import queue
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from stratagem.cluster import addresses
from stratagem.cluster.addresses import HTTP, free_ports, probe
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.remote import ray_cluster
from stratagem.launch.remote.ray_cluster import (
    RayCluster,
    RayWatch,
    ServerRegistry,
    Service,
    has_token,
)
from tests.unit.launch.remote.answering import answering, listening
from tests.unit.launch.remote.living import name_of, wait_for_end

PROGRAM = """
import json, os, signal, sys
from stratagem.cluster.preemption.signals import has_foreign_handler
from stratagem.launch.remote.ray_cluster import RayCluster
before = signal.getsignal(signal.SIGTERM)
cluster = RayCluster()
cluster.wait()
from stratagem.launch.processes import RayProcesses
from stratagem.group.transport.endpoints import ClusterKeys
from tests.unit.parameter_server import forked_objects as served
from tests.unit.launch.remote.living import descendants
processes = RayProcesses("worker", served.serve_told, [(ClusterKeys.make(), sys.argv[1])])
processes.addresses
processes.watch(print, print, print)
facts = {
    "started": sorted(descendants(os.getpid())),
    "pids": processes.pids,
    "is_handler_kept": signal.getsignal(signal.SIGTERM) is before,
    "has_foreign_handler": has_foreign_handler(signal.SIGTERM),
    "mode": os.environ.get("RAY_AUTH_MODE"),
}
print("TOLD " + json.dumps(facts), flush=True)
if sys.stdin.read() == "fail":
    raise SystemExit("failed on purpose")
"""


class Program:
    """A program of its own, with a home of its own, that has started Ray."""

    def __init__(self, folder: Path) -> None:
        left_out = ("RAY_", "STRATAGEM_TEST")
        variables = {k: v for k, v in os.environ.items() if not k.startswith(left_out)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env={**variables, "HOME": str(folder)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.lines: list[str] = []
        self.facts: dict[str, Any] = {}
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if line.startswith("TOLD "):
                self.facts = json.loads(line[5:])
                break

    def end(self, said: str | None) -> None:
        """Ends it: by what it reads, or by SIGKILL."""
        if said is None:
            self.process.kill()
        out, err = self.process.communicate(said, timeout=60)
        self.lines += [*out.splitlines(), *err.splitlines()]


@pytest.mark.slow
def test_program_that_fails_leaves_nothing(tmp_path) -> None:
    program = Program(tmp_path)
    assert len(program.facts["started"]) > 4
    program.end("fail")
    assert program.process.returncode == 1
    assert "failed on purpose" in program.lines
    assert wait_for_end(program.facts["started"]) == set()
    # In good order: what it served was closed.
    (pid,) = program.facts["pids"]
    assert tmp_path.joinpath("closed-0").read_text() == str(pid)
    # What a process prints comes with its name, and the id of the one that keeps it.
    line = re.compile(rf"\(worker:0 pid=\d+\) process 0 serves {re.escape(str(tmp_path))}")
    assert any(map(line.fullmatch, program.lines))
    # Ray takes SIGTERM from programs that connect in their main thread.
    assert program.facts["is_handler_kept"]
    # A notice of preemption can then be received, and the handler be restored.
    assert not program.facts["has_foreign_handler"]
    assert program.facts["mode"] == "token"
    token = tmp_path / ".ray" / "auth_token"
    assert len(token.read_text()) == 64
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.slow
def test_program_that_is_killed_leaves_nothing_that_works(tmp_path) -> None:
    program = Program(tmp_path)
    started = set(program.facts["started"])
    assert program.facts["pids"][0] in started
    # Ray's agents hold nothing, but look for its head a minute or two before they end.
    agents = {pid for pid in started if name_of(pid).endswith("Agent")}
    program.end(None)
    try:
        assert wait_for_end(started - agents) == set()
        assert len(agents) == 2
    finally:
        for pid in wait_for_end(agents, timeout_s=0.1):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def no_token(monkeypatch, tmp_path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")  # so that what is set meanwhile is gone at the end
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.usefixtures("no_token")
def test_token_is_made_once_and_for_those_who_want_one(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    ray_cluster.make_token()
    assert not has_token()
    monkeypatch.delenv("RAY_AUTH_MODE")
    ray_cluster.make_token()
    token = tmp_path.joinpath(".ray", "auth_token").read_text()
    assert has_token()
    ray_cluster.make_token()
    assert tmp_path.joinpath(".ray", "auth_token").read_text() == token
    # Of a home that cannot be written, it is in the environment.
    monkeypatch.setenv("HOME", "/proc/no-such-folder")
    ray_cluster.make_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_client_of_ray_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="is an address of Ray Client"):
        RayCluster("ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match="Ray address 'ray://head:10001'"):
        RayCluster()


@pytest.fixture
def own_settings(monkeypatch) -> None:
    """What connecting sets is gone afterwards."""
    for name in (*ray_cluster.quiet_settings(), "RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("own_settings")
def test_address_where_no_ray_is_is_reported(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    address = f"127.0.0.1:{free_ports(1)[0]}"
    with RayCluster(address) as cluster:
        assert not cluster.started_here
        with pytest.raises(DeadlineExceededError, match=f"head of the Ray cluster at {address}"):
            cluster.wait()
    assert not ray.is_initialized()


@pytest.mark.usefixtures("own_settings")
def test_ray_that_is_not_installed_is_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with RayCluster() as cluster, pytest.raises(ImportError, match="a Ray cluster needs ray"):
        cluster.wait()


# Services of Ray: one that listens and does not answer is silent, and then lost.


@pytest.fixture
def give_up_early(monkeypatch) -> Callable[[], None]:
    """From then on, a service that says nothing is given up after 0.2 s."""
    monkeypatch.setattr(addresses, "_PROBE_S", 120.0)
    return lambda: monkeypatch.setattr(addresses, "_PROBE_S", 0.2)


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


_ANSWERS = {"t": "there", "r": "refused", "s": "no answer within 1 s"}


@pytest.mark.parametrize(
    ("answers", "has_started", "lost_at_s", "has_ended"),
    [
        ("t" * 100, True, None, False),
        ("s" * 100, True, 31, False),
        ("r" * 10, True, 4, True),
        (("s" * 30 + "t") * 3, True, None, False),
        # One that may still start has more time, until it was there once.
        ("r" * 100, False, 61, False),
        ("r" * 50 + "t" + "r" * 10, False, 55, True),
    ],
)
def test_service_is_lost_if_silent(monkeypatch, answers, has_started, lost_at_s, has_ended) -> None:
    now_s = [0.0]
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "30")
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "60")
    monkeypatch.setattr(ray_cluster, "time", types.SimpleNamespace(monotonic=lambda: now_s[0]))
    monkeypatch.setattr(ray_cluster, "probe", lambda *_: _ANSWERS[answers[int(now_s[0]) - 1]])
    service = Service("raylet", "a:1", has_started=has_started)
    found = None
    while found is None and now_s[0] < len(answers):
        now_s[0] += 1
        service.look()
        found = int(now_s[0]) if service.is_lost else None
    assert (found and found - 1, service.has_ended) == (lost_at_s, has_ended)


# Ray processes that stop answering, here plain sockets, and a real cluster that is killed.

_LIMIT_S = 60.0


@pytest.fixture
def losses(monkeypatch) -> queue.Queue[UnavailableError]:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "2")
    monkeypatch.setattr(ray_cluster, "mark_ray_lost", lambda: None)
    return queue.Queue()


def test_process_that_ends_is_named_with_the_limit_and_what_to_do(losses) -> None:
    with answering() as gcs, contextlib.ExitStack() as stack:
        watched = {"GCS": gcs, "raylet": stack.enter_context(answering())}
        with RayWatch(watched, losses.put):
            stack.close()
            error = losses.get(timeout=_LIMIT_S)
    words = rf"Ray's raylet at {watched['raylet']} has not answered for 1 s: refused"
    with pytest.raises(UnavailableError, match=rf"{words}(?s:.)*STRATAGEM_PEER_TIMEOUT_S(?s:.)*"):
        raise error
    assert "start the Ray cluster again" in str(error)
    assert losses.empty()  # told once


def test_process_that_was_stopped_is_named(losses) -> None:
    """The kernel still accepts connections for it."""
    with listening() as stopped, RayWatch({"raylet": stopped}, losses.put):
        error = losses.get(timeout=_LIMIT_S)
    assert f"Ray's raylet at {stopped} has not answered for 2 s: no answer within 1 s" in str(error)


@pytest.mark.slow
def test_process_that_is_restarted_in_time_is_not_lost(losses) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        watch = RayWatch({"GCS": f"127.0.0.1:{port}"}, losses.put)
    with socket.create_server(("127.0.0.1", port)) as second, watch:
        second.settimeout(_LIMIT_S)
        for _ in range(4):  # as many probes as the limit has seconds, and more
            second.accept()[0].close()
    assert losses.empty()


# Registry that workers share.


def test_who_enters_learns_where_the_servers_are_now() -> None:
    registry = ServerRegistry(b"keys", ["tcp://a:1", "tcp://a:2"])
    assert registry.enter(0, "node") == (b"keys", ["tcp://a:1", "tcp://a:2"])
    assert registry.address_of(1) == "tcp://a:2"
    registry.move(1, "tcp://b:2")
    assert registry.address_of(1) == "tcp://b:2"
    assert registry.enter(1, "other") == (b"keys", ["tcp://a:1", "tcp://b:2"])


def test_who_leaves_is_not_waited_for() -> None:
    registry = ServerRegistry(b"", [])
    for worker in (0, 1):
        registry.enter(worker, f"node {worker}")
    registry.leave(0)
    registry.leave(0)
    assert registry.present() == {1: "node 1"}
