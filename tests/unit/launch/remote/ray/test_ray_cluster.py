"""Connection to Ray: started here or found, and closed completely."""

from __future__ import annotations

import contextlib
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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from stratagem.cluster.addresses import free_ports
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError, UnavailableError
from stratagem.launch.remote.ray import ray_cluster
from stratagem.launch.remote.ray import ray_cluster as ray_watch
from stratagem.launch.remote.ray.leader import leader_of, tasks_of
from stratagem.launch.remote.ray.ray_cluster import (
    RayCluster,
    RayWatch,
    ServerRegistry,
    has_token,
    start_local_ray,
)
from stratagem.launch.remote.ray.streamed_process import StreamedProcess, TaskActor, TaskMessage
from tests.unit.launch.remote.living import name_of, wait_for_end
from tests.unit.launch.remote.ray.answering import answering, listening

PROGRAM = """
import json, os, signal, sys
from stratagem.cluster.preemption.signals import has_foreign_handler
from stratagem.launch.remote.ray.ray_cluster import start_local_ray
before = signal.getsignal(signal.SIGTERM)
cluster = start_local_ray()
cluster.wait()
from stratagem.launch.processes.ray_processes import RayProcesses
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


def test_token_is_made_once(tmp_path, monkeypatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert not has_token()
    ray_cluster.make_token()
    token = tmp_path.joinpath(".ray", "auth_token").read_text()
    assert has_token()
    ray_cluster.make_token()
    assert tmp_path.joinpath(".ray", "auth_token").read_text() == token


def test_token_of_a_home_that_cannot_be_written_is_in_the_environment(monkeypatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "")  # which is none, and set again at the end
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("HOME", "/proc/no-such-folder")
    ray_cluster.make_token()
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


def test_no_token_is_made_for_who_wants_none(tmp_path, monkeypatch) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("HOME", str(tmp_path))
    ray_cluster.make_token()
    assert not has_token()


def test_client_of_ray_is_refused(monkeypatch) -> None:
    with pytest.raises(ValueError, match="is an address of Ray Client"):
        RayCluster("ray://head:10001")
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    with pytest.raises(ValueError, match="Ray address 'ray://head:10001'"):
        start_local_ray()


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
    with start_local_ray(address) as cluster:
        assert not cluster.started_here
        with pytest.raises(DeadlineExceededError, match=f"head of the Ray cluster at {address}"):
            cluster.wait()
    assert not ray.is_initialized()


@pytest.mark.usefixtures("own_settings")
def test_ray_that_is_not_installed_is_reported(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        start_local_ray() as cluster,
        pytest.raises(ImportError, match="a cluster of parameter servers needs ray"),
    ):
        cluster.wait()


# Process with streamed output.


class Said:
    """What a process has printed."""

    def __init__(self) -> None:
        self.texts = {"out": "", "err": ""}
        self.changed = threading.Condition()

    def __call__(self, kind: str, text: str) -> None:
        with self.changed:
            self.texts[kind] += text
            self.changed.notify_all()

    def wait_for(self, text: str) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.texts["out"], 120), self.texts


def _started(program: str, said: Said, **variables: str) -> StreamedProcess:
    return StreamedProcess((sys.executable, "-uc", program), {**os.environ, **variables}, said)


def test_both_streams_and_the_exit_code_arrive() -> None:
    said = Said()
    program = "import os, sys; print('a\\rb\\u2713', os.environ['X']); sys.exit('bad')"
    with _started(program, said, X="y", PYTHONIOENCODING="utf-8") as process:
        assert process.wait() == 1
    assert said.texts == {"out": "a\rb\u2713 y\n", "err": "bad\n"}


def test_process_that_goes_on_is_ended_with_what_it_has_started() -> None:
    said = Said()
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with _started(program, said) as process:
        said.wait_for("\n")
        assert process.wait(0.0) is None
        process.end()
        assert process.wait() == 5
    assert wait_for_end([int(said.texts["out"].split()[1])]) == set()


def test_process_that_will_not_end_is_killed() -> None:
    said = Said()
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    with _started(program, said) as process:
        said.wait_for("ready")
        process.end(grace_s=0.1)
        assert process.wait() == -9


def test_program_that_is_not_there_is_recognized_by_its_exit_code() -> None:
    said = Said()
    with StreamedProcess(("/no/such/program",), dict(os.environ), said) as process:
        assert process.wait() == 127
    assert "Cannot run /no/such/program" in said.texts["err"]


def test_folder_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError):
        StreamedProcess((sys.executable, "-V"), dict(os.environ), Said(), "/no/such/folder")


# Actor that runs one task.


@pytest.fixture
def actor() -> Iterator[TaskActor]:
    with contextlib.closing(TaskActor("10.0.0.7")) as made:
        yield made


def _all_messages(actor: TaskActor) -> list[TaskMessage]:
    found: list[TaskMessage] = []
    while not found or found[-1][0] != "end":
        found += actor.next(0.2)
    return found


def test_address_is_a_free_port_of_its_machine(actor) -> None:
    host, port = actor.free_address()
    assert host == "10.0.0.7"
    assert 0 < port < 65536


def test_task_says_what_it_prints_and_how_it_ends(actor, monkeypatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "of the actor")
    monkeypatch.setenv("TF_CONFIG", "of the machine")
    program = (
        "import os, sys\n"
        "open(sys.argv[1], 'w').write('42')\n"
        "print(os.environ.get('RAY_ADDRESS'), os.environ['TF_CONFIG'], os.environ['HOME'] != '')\n"
        "sys.exit(3)\n"
    )
    actor.start(("-c", program, "{answer}"), {"TF_CONFIG": "of the job"})
    *found, end = _all_messages(actor)
    assert {kind for kind, _ in found} == {"out"}
    assert "".join(text for _, text in found) == "None of the job True\n"
    assert end == ("end", "3")
    assert actor.answer() == b"42"


def test_task_without_an_answer_has_none(actor) -> None:
    actor.start(("-c", ""), {})
    assert _all_messages(actor) == [("end", "0")]
    assert actor.answer() == b""


def test_closed_actor_ends_its_process(actor) -> None:
    actor.start(("-uc", "import os, time; print(os.getpid()); time.sleep(100)"), {})
    found: list[TaskMessage] = []
    while not found:
        found = actor.next(1.0)
    pid = int(found[0][1])
    os.kill(pid, 0)
    actor.close()
    assert wait_for_end([pid]) == set()


# Ray processes that stop answering, here plain sockets, and a real cluster that is killed.

_LIMIT_S = 60.0


@pytest.fixture
def losses(monkeypatch) -> queue.Queue[UnavailableError]:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "2")
    monkeypatch.setattr(ray_watch, "mark_ray_lost", lambda: None)
    return queue.Queue()


def test_process_that_ends_is_named_with_the_limit_and_what_to_do(losses) -> None:
    with answering() as gcs, contextlib.ExitStack() as stack:
        addresses = {"GCS": gcs, "raylet": stack.enter_context(answering())}
        with RayWatch(addresses, losses.put):
            stack.close()
            error = losses.get(timeout=_LIMIT_S)
    words = rf"Ray's raylet at {addresses['raylet']} has not answered for 1 s: refused"
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


# Order of a cluster's tasks, and its leader.


@pytest.mark.parametrize(
    ("cluster", "leader"),
    [
        ({"ps": ["a:1"], "worker": ["b:1"], "chief": ["c:1"]}, ("chief", 0)),
        ({"ps": ["a:1"], "worker": {1: "b:1", 2: "c:1"}}, ("worker", 1)),
        ({"ps": ["a:1", "b:1"], "evaluator": ["c:1"]}, ("ps", 0)),
    ],
)
def test_leader_is_the_chief_or_the_first_worker(cluster, leader) -> None:
    assert leader_of(ClusterSpec(cluster)) == leader


def test_all_tasks_are_named() -> None:
    spec = ClusterSpec({"evaluator": ["e:1"], "ps": ["p:1"], "worker": {0: "a:1", 2: "b:1"}})
    assert tasks_of(spec) == [("worker", 0), ("worker", 2), ("ps", 0), ("evaluator", 0)]


def test_cluster_without_tasks_has_no_leader() -> None:
    with pytest.raises(ValueError, match="has no task"):
        leader_of(ClusterSpec({}))


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
