"""Functions and scripts on a cluster whose head is a process of this machine."""

from __future__ import annotations

import dataclasses
import importlib
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stratagem.cluster.addresses import free_ports
from stratagem.cluster.resolvers.simple import SimpleClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import DeadlineExceededError
from stratagem.launch.functions import RemoteError
from stratagem.launch.remote import remote_cluster
from stratagem.launch.remote.jobs_client import local_modules
from stratagem.launch.remote.remote_cluster import RemoteCluster
from tests.unit.launch.remote.heads import Head

CALCULATIONS = """
def divide(a, b):
    print("dividing", a)
    return a / b

class OddError(Exception):
    # It cannot be made from what it says it was made of.
    def __init__(self, one, two):
        super().__init__(one)

def fail():
    raise OddError(1, 2)
"""


@pytest.fixture
def calculations(tmp_path, monkeypatch) -> Iterator[Any]:
    """A module that only this side has."""
    (tmp_path / "laptop").mkdir()
    (tmp_path / "laptop" / "calculations.py").write_text(CALCULATIONS)
    monkeypatch.syspath_prepend(str(tmp_path / "laptop"))
    yield importlib.import_module("calculations")
    del sys.modules["calculations"]


@pytest.fixture(autouse=True)
def few_modules(monkeypatch) -> None:
    """The modules of all tests are not what a program would send."""
    monkeypatch.setattr(
        remote_cluster,
        "local_modules",
        lambda: {name: place for name, place in local_modules().items() if name == "calculations"},
    )


def _script(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "beside.py").write_text("NUMBER = 42\n")
    path = folder / "train.py"
    path.write_text(text)
    return path


def test_function_returns_and_prints(fake_head, calculations, capfd) -> None:
    cluster = RemoteCluster(fake_head.url)
    assert cluster.run(calculations.divide, (1.0,), {"b": 2.0}) == 0.5
    assert capfd.readouterr().out == "dividing 1.0\n"


@pytest.mark.slow
def test_second_program_follows_the_first(fake_head, tmp_path, capfd) -> None:
    cluster = RemoteCluster(fake_head.url.removeprefix("http://"))
    program = "import sys, beside; print(sys.argv[1:], beside.NUMBER); sys.exit(3)"
    script = _script(tmp_path / "project", program)
    assert cluster.run_script(script, ["--epochs", "it's"]) == 3
    assert cluster.run_script(script) == 3
    assert capfd.readouterr().out == "['--epochs', \"it's\"] 42\n[] 42\n"
    assert fake_head.num_uploads == 1


def test_error_of_the_function_is_raised_with_its_traceback(fake_head, calculations) -> None:
    with pytest.raises(ZeroDivisionError, match="division by zero") as raised:
        RemoteCluster(fake_head.url).run(calculations.divide, (1, 0))
    assert isinstance(raised.value.__cause__, RemoteError)
    assert "in divide" in str(raised.value.__cause__)


def test_other_python_is_reported(fake_head, monkeypatch) -> None:
    class Other(RemoteCluster):
        def _run(self, package: Any, plan: Any) -> Any:
            return super()._run(package, dataclasses.replace(plan, python="3.7"))

    words = r"did not finish on the cluster: exit code 1\."
    with pytest.raises(RuntimeError, match=words) as raised:
        Other(fake_head.url).run(len, ("ab",))
    assert "The client has Python 3.7" in str(raised.value)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: RemoteCluster(_WORKERS).run(len, ("ab",), answer_of=("evaluator", 0)),
            ValueError,
            r"answer_of=\('evaluator', 0\) is not a task that calls the function",
        ),
        (
            lambda: RemoteCluster("http://127.0.0.1:1", client_timeout_s=0),
            ValueError,
            "client_timeout_s=0 ends every job at once",
        ),
        (lambda: RemoteCluster(3), TypeError, "cluster=3 is of type int"),
        (lambda: RemoteCluster({}), ValueError, "has no task"),
    ],
)
def test_wrong_arguments_are_refused(call, error, words) -> None:
    with pytest.raises(error, match=words):
        call()


_WORKERS = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]}


def test_what_cannot_be_sent_is_named() -> None:
    cluster = RemoteCluster("http://127.0.0.1:1")
    lock = threading.Lock()

    def closing() -> object:
        return lock

    with pytest.raises(TypeError, match=r"Variable 'lock' of .* cannot be sent to the cluster"):
        cluster.run(closing)
    with pytest.raises(TypeError, match=r"Variable 'lock' of Argument 0\.hooks\[1\] of .*lock"):
        cluster.run(print, (types.SimpleNamespace(hooks=[len, closing]),))
    with pytest.raises(TypeError, match=r"Argument 1 of .* cannot be sent to the cluster"):
        cluster.run(divmod, (1, lock))
    with pytest.raises(TypeError, match=r"Argument 'b' of .* cannot be sent to the cluster"):
        cluster.run(dict, (), {"b": lock})
    with pytest.raises(TypeError, match=r"fn=3 is of type int"):
        cluster.run(3)  # type: ignore[arg-type]


@pytest.mark.slow
def test_answer_of_somebody_else_is_not_read(fake_head, monkeypatch) -> None:
    monkeypatch.setattr(remote_cluster, "answer_key", lambda nonce: b"another")
    with pytest.raises(ValueError, match="signature of the job's answer is wrong"):
        RemoteCluster(fake_head.url).run(divmod, (1, 1))


def _cluster_at(head: Head, **options: float) -> RemoteCluster:
    port = int(head.url.rpartition(":")[2])
    spec = ClusterSpec({"chief": ["127.0.0.1:2222"], "ps": ["p:1"], "worker": ["w:1", "w:2"]})
    return RemoteCluster(SimpleClusterResolver(spec), jobs_port=port, **options)


@pytest.mark.slow
def test_coordinator_learns_its_cluster(fake_head, tmp_path, capfd) -> None:
    fake_head.machines = [{"chief:0": 1}, {"ps:0": 1}, {"worker:0": 1}, {"worker:1": 1, "CPU": 2}]
    program = (
        "import os, json, stratagem as sg\n"
        "sg.connect_to_cluster({'chief': ['elsewhere:1']})\n"
        "found = json.loads(os.environ['TF_CONFIG'])\n"
        "print(sorted(found['cluster']), found['task'], os.environ['RAY_ADDRESS'])\n"
    )
    assert _cluster_at(fake_head).run_script(_script(tmp_path / "project", program)) == 0
    printed = capfd.readouterr().out
    assert printed == "['chief', 'ps', 'worker'] {'type': 'chief', 'index': 0} 127.0.0.1:2222\n"


def test_servers_that_are_missing_are_named(fake_head) -> None:
    fake_head.machines = [{"chief:0": 1}, {"worker:0": 1}]
    cluster = _cluster_at(fake_head, join_timeout_s=0)  # which is not the default
    with pytest.raises(DeadlineExceededError, match=r"is incomplete after 0 s") as raised:
        cluster.run(divmod, (1, 1))
    message = str(raised.value)
    assert "worker 1 (w:2), ps 0 (p:1)" in message
    assert "STRATAGEM_JOIN_TIMEOUT_S" in message
    assert fake_head.processes == {}


def test_leader_that_is_missing_is_named() -> None:
    cluster = RemoteCluster(
        {"worker": ["127.0.0.1:1"]}, jobs_port=free_ports(1)[0], join_timeout_s=0.1
    )
    with pytest.raises(DeadlineExceededError, match="its leader"):
        cluster.run(divmod, (1, 1))


@pytest.mark.parametrize("stop", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_interrupted_client_stops_its_job_if_asked_to(fake_head, monkeypatch, stop) -> None:
    def interrupted(*arguments: object, **more: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(remote_cluster, "follow", interrupted)
    cluster = RemoteCluster(fake_head.url, stop_with_client=stop)
    with pytest.raises(KeyboardInterrupt):
        cluster.run(time.sleep, (100,))
    assert fake_head.stopped == (["job0"] if stop else [])


@pytest.mark.slow
def test_signal_ends_the_job_and_then_this_process(fake_head, monkeypatch) -> None:
    received: list[int] = []
    monkeypatch.setattr(
        remote_cluster.follow.__globals__["JobOutput"],
        "show",
        lambda self, frame: signal.raise_signal(signal.SIGTERM),
    )
    before = signal.signal(signal.SIGTERM, lambda signum, _: received.append(signum))
    try:
        with pytest.raises(SystemExit) as raised:
            RemoteCluster(fake_head.url).run(
                exec, ("import time; print('runs', flush=True); time.sleep(100)",)
            )
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (raised.value.code, received) == (143, [signal.SIGTERM])
    assert fake_head.stopped == ["job0"]
    assert fake_head.processes["job0"].wait(timeout=120) != 0


@pytest.mark.slow
def test_clients_take_turns(fake_head, monkeypatch, capfd, tmp_path) -> None:
    fake_head.machines = [{"chief:0": 1, "ps:0": 1, "worker:0": 1, "worker:1": 1}]
    monkeypatch.setattr(remote_cluster, "_REPORT_WAIT_AFTER_S", 0.0)
    script = _script(tmp_path / "project", "print('done')")
    first = subprocess.Popen(["sleep", "100"], start_new_session=True)
    fake_head.processes["job0"] = first
    fake_head.metadata["job0"] = {"stratagem_client": "somebody at another"}
    with pytest.raises(DeadlineExceededError, match=r"is still busy after 0\.1 s") as raised:
        _cluster_at(fake_head, join_timeout_s=0.1).run_script(script)
    assert "job0 of somebody at another" in str(raised.value)
    announce = remote_cluster.logs.announce

    def end_the_first(logger: Any, text: str) -> None:
        announce(logger, text)
        if text.startswith("Waiting for job0"):
            first.kill()

    monkeypatch.setattr(remote_cluster.logs, "announce", end_the_first)
    assert _cluster_at(fake_head).run_script(script) == 0
    printed = capfd.readouterr()
    assert printed.out == "done\n"
    assert "Waiting for job0 of somebody at another." in printed.err


@pytest.mark.slow
def test_job_ends_when_nothing_is_heard_of_its_client(fake_head, monkeypatch, capfd) -> None:
    class Silent(remote_cluster.Lease):
        def _renew(self) -> None:
            pass

    monkeypatch.setattr(remote_cluster, "Lease", Silent)

    def work() -> None:
        print("begins", flush=True)
        threading.Event().wait()

    # The job asks the head where Ray says that it is; here it is told.
    plan = RemoteCluster._plan
    monkeypatch.setattr(
        RemoteCluster,
        "_plan",
        lambda self, command: dataclasses.replace(plan(self, command), url=fake_head.url),
    )
    with pytest.raises(RuntimeError, match="did not finish") as raised:
        RemoteCluster(fake_head.url, client_timeout_s=1.0).run(work)
    assert "has not responded for 1 s" in str(raised.value)
    assert "STRATAGEM_CLIENT_TIMEOUT_S" in capfd.readouterr().err
