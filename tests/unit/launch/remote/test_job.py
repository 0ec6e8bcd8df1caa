"""The program of a job, as one process and as several tasks.

Actors are objects of this process, called in threads.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.launch.remote import job
from stratagem.launch.remote.job import JobProcess, LeaseWatch, TaskMessage, run
from stratagem.launch.remote.jobs_client import JobsClient
from stratagem.launch.remote.protocol import (
    FrameReader,
    FrameWriter,
    JobPlan,
    LogFrame,
    answer_key,
    lease_path,
    signed,
    verified,
)
from tests.fuzzing import JSON, fuzz
from tests.unit.launch.remote.living import wait_for_end


class RayError(Exception):
    """As Ray's own."""


class Actor:
    """An object whose methods are called elsewhere."""

    def __init__(self, made: Any, pool: concurrent.futures.Executor, options: Any) -> None:
        self.made = made
        self.options = options
        self.is_lost = False
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            if self.is_lost:
                raise RayError("the node died")
            return getattr(self.made, name)(*arguments)

        def remote(*arguments: Any) -> Any:
            answer = self._pool.submit(call, *arguments)
            return types.SimpleNamespace(future=lambda: answer)

        return types.SimpleNamespace(remote=remote)


class FakeRay:
    """What of Ray is used."""

    exceptions = types.SimpleNamespace(RayError=RayError)

    def __init__(self, pool: concurrent.futures.Executor) -> None:
        self.actors: list[Actor] = []
        self.killed: list[Actor] = []
        self._pool = pool

    def init(self, **options: Any) -> None:
        self.options = options

    def remote(self, kind: Any) -> Any:
        def make(options: Any, *arguments: Any) -> Actor:
            self.actors.append(Actor(kind(*arguments), self._pool, options))
            return self.actors[-1]

        return types.SimpleNamespace(
            options=lambda **options: types.SimpleNamespace(
                remote=lambda *arguments: make(options, *arguments)
            )
        )

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.fixture
def fake_ray(monkeypatch):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = FakeRay(pool)
        monkeypatch.setattr(job, "load_ray", lambda: made)
        monkeypatch.setattr(job, "watched_addresses", dict)
        yield made


def _text(plan: JobPlan) -> str:
    return json.dumps(dataclasses.asdict(plan))


def _plan(program: str) -> JobPlan:
    return JobPlan(
        nonce="n",
        command=("-uc", program, "{answer}"),
        cluster={"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"]},
        tasks=(("chief", 0), ("worker", 0)),
        head="127.0.0.1:1",
    )


def _run(
    plan: JobPlan, path: Path, is_over: threading.Event | None = None
) -> tuple[tuple[int, bytes], list[LogFrame]]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    frames = FrameWriter("n", descriptor)
    try:
        code, answer = run(plan, frames, is_over or threading.Event())
    finally:
        os.close(descriptor)
    return (code, base64.b64decode(answer)), list(FrameReader("n").feed(path.read_text()))


_NAMES = ("chief 0", "worker 0")
_CONFIG = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print(json.dumps(config), flush=True)
open(sys.argv[1], "w").write(config["task"]["type"])
"""


@pytest.mark.parametrize("named", ["chief", "worker"])
def test_each_task_has_its_place_in_a_cluster_of_free_ports(fake_ray, tmp_path, named) -> None:
    plan = dataclasses.replace(_plan(_CONFIG), answers=(named, 0))
    (code, answer), frames = _run(JobPlan(**json.loads(_text(plan))), tmp_path / "log")
    assert (code, answer) == (0, named.encode())
    assert frames[0].kind == "started"
    printed = {name: "".join(f.text for f in frames if f.task == name) for name in _NAMES}
    configs = {name: json.loads(text) for name, text in printed.items()}
    assert configs["chief 0"]["task"] == {"type": "chief", "index": 0}
    assert configs["worker 0"]["task"] == {"type": "worker", "index": 0}
    clusters = [config["cluster"] for config in configs.values()]
    assert clusters[0] == clusters[1]
    ports = {int(one[0].rpartition(":")[2]) for one in clusters[0].values()}
    assert len(ports) == 2
    assert not {1, 2} & ports
    assert [actor.options["resources"] for actor in fake_ray.actors] == [
        {"chief:0": 1},
        {"worker:0": 1},
    ]
    assert fake_ray.killed == fake_ray.actors
    assert fake_ray.options["address"] == "127.0.0.1:1"


def test_first_failure_ends_all(fake_ray, tmp_path) -> None:
    program = (
        "import os, sys, time\n"
        "if 'type\": \"worker' in os.environ['TF_CONFIG']:\n"
        "    open(sys.argv[1], 'w').write('why')\n"
        "    sys.exit(9)\n"
        "time.sleep(100)\n"
    )
    ended, _ = _run(_plan(program), tmp_path / "log")
    assert ended == (9, b"why")


def test_job_that_is_over_ends_its_tasks(fake_ray, tmp_path) -> None:
    is_over = threading.Event()
    is_over.set()
    (code, answer), _ = _run(_plan("import time; time.sleep(100)"), tmp_path / "log", is_over)
    assert (code, answer) == (-15, b"")


def test_lost_machine_is_a_failure_of_its_task(fake_ray, tmp_path, monkeypatch) -> None:
    class LostLater(JobProcess):
        def next(self, timeout_s: float) -> Any:
            fake_ray.actors[1].is_lost = True
            return super().next(timeout_s)

    monkeypatch.setattr(job, "JobProcess", LostLater)
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    fake_ray.actors[1].made.close()
    assert ended == (1, b"")
    assert "The machine of worker 0 was lost: the node died" in frames[-1].text


def test_lost_ray_ends_the_job_with_its_error(fake_ray, tmp_path, monkeypatch) -> None:
    class LostAtOnce(contextlib.nullcontext):
        def __init__(self, addresses: Any, on_lost: Any) -> None:
            super().__init__()
            on_lost(RuntimeError(f"Ray's GCS is lost: {addresses}"))

    monkeypatch.setattr(job, "RayWatch", LostAtOnce)
    monkeypatch.setattr(job, "watched_addresses", lambda: {"GCS": "a:1"})
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    for actor in fake_ray.actors:
        actor.made.close()
    assert ended == (1, b"")
    assert frames[-1] == LogFrame("note", "", "Ray's GCS is lost: {'GCS': 'a:1'}")
    assert fake_ray.killed == []  # Ray would not answer


# Process of a program, which an actor runs, too.


@pytest.fixture
def task() -> Iterator[JobProcess]:
    with JobProcess("10.0.0.7") as made:
        yield made


def _all_messages(task: JobProcess, until: str = "") -> list[TaskMessage]:
    """Messages until the end, or until such a text was printed."""
    found: list[TaskMessage] = []
    while not found or found[-1][0] != "end":
        found += task.next(0.2)
        if until and any(until in text for _, text in found):
            break
    return found


def _printed(messages: list[TaskMessage], kind: str = "out") -> str:
    return "".join(text for its_kind, text in messages if its_kind == kind)


def test_process_that_goes_on_is_ended_with_what_it_has_started(task) -> None:
    program = (
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))\n"
        "child = subprocess.Popen(['sleep', '100'])\n"
        "print('child', child.pid, flush=True)\n"
        "child.wait()\n"
    )
    task.start(("-uc", program), {})
    child = int(_printed(_all_messages(task, until="\n")).split()[1])
    assert task.next(0.0) == []
    task.end()
    assert _all_messages(task) == [("end", "5")]
    assert wait_for_end([child]) == set()


def test_process_that_will_not_end_is_killed(task, monkeypatch) -> None:
    monkeypatch.setattr(job, "_GRACE_S", 0.1)
    program = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('ready', flush=True)\ntime.sleep(100)\n"
    )
    task.start(("-uc", program), {})
    _all_messages(task, until="ready")
    task.end()
    assert _all_messages(task)[-1] == ("end", str(-signal.SIGKILL))


def test_closed_task_ends_its_process(task) -> None:
    task.start(("-uc", "import os, time; print(os.getpid()); time.sleep(100)"), {})
    pid = int(_printed(_all_messages(task, until="\n")))
    os.kill(pid, 0)
    task.close()
    assert wait_for_end([pid]) == set()


# Lease of a client, as its job sees it.


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(job, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def test_client_that_renews_is_alive_and_one_that_stops_is_not(fake_head, clock) -> None:
    def renew(nonce: str, number: int) -> None:
        fake_head.packages[lease_path(nonce, number).rpartition("/")[2]] = b""

    watch = LeaseWatch(JobsClient(fake_head.url), "n", 30.0)
    renew("n", 1)
    clock[0] += 29
    assert not watch.is_over()
    renew("n", 2)
    renew("n", 3)
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 29
    assert not watch.is_over()
    renew("other", 4)
    clock[0] += 2
    assert watch.is_over()


def test_time_in_which_nobody_can_be_heard_does_not_count(fake_head, clock, monkeypatch) -> None:
    jobs = JobsClient(fake_head.url)
    watch = LeaseWatch(jobs, "n", 30.0)
    with monkeypatch.context() as silent:
        silent.setattr(jobs, "is_renewed", JobsClient("http://127.0.0.1:1", "t").is_renewed)
        clock[0] += 100
        assert not watch.is_over()
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 2
    assert watch.is_over()


# Frames in a log among other lines.


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "log"


def _written(log: Path, *frames: tuple[str, str, str], before: bytes = b"") -> str:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, before)
    writer = FrameWriter("n0", descriptor)
    for kind, text, task in frames:
        writer.write(kind, text, task)
    os.close(descriptor)
    return log.read_text()


def test_what_is_printed_arrives_as_it_was_among_lines_of_others(log) -> None:
    text = _written(
        log,
        ("out", "10%\r50%\r\u2713\n", "worker 1"),
        ("err", "", ""),
        before=b"Runtime env is setting up.\nhalf a line",
    )
    reader = FrameReader("n0")
    frames = [frame for letter in text for frame in reader.feed(letter)]
    assert frames == [LogFrame("out", "worker 1", "10%\r50%\r\u2713\n"), LogFrame("err", "", "")]
    assert reader.others == ["Runtime env is setting up.", "half a line"]
    assert list(FrameReader("n1").feed(text)) == []  # of another job


def test_answer_is_known_by_its_signature() -> None:
    content, other = base64.b64encode(b"content").decode(), base64.b64encode(b"other").decode()
    text = signed(content, b"key")
    assert verified(text, b"key") == b"content"
    for wrong in (signed(content, b"other"), signed(other, b"key")[:64] + content, "\u2713", ""):
        with pytest.raises(ValueError, match="signature of the job's answer is wrong"):
            verified(wrong, b"key")


@fuzz
@given(st.lists(st.one_of(JSON.map(json.dumps), st.text(max_size=50)), max_size=20))
def test_any_line_of_a_log_is_a_frame_or_not(lines) -> None:
    reader = FrameReader("n")
    for line in lines:
        for frame in reader.feed(f"\n\x1en{line}\n{line}\n"):
            assert list(map(type, (frame.kind, frame.task, frame.text))) == [str] * 3
        assert len(reader.others) <= 100


# The program of a job: it runs the client's command, and reports its output, answer and end.


def frames_of(plan: JobPlan) -> tuple[int, list[tuple[str, str]]]:
    """Runs a job, and returns its exit code and what its frames report."""
    command = [sys.executable, "-m", "stratagem.launch.remote.job", _text(plan)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reader = FrameReader(plan.nonce)
    return done.returncode, [(frame.kind, frame.text) for frame in reader.feed(done.stdout)]


def test_program_on_the_head_is_the_chief_of_its_cluster() -> None:
    program = "import os; print(os.environ['TF_CONFIG'], end='')"
    cluster = {"chief": ["a:1"], "ps": ["b:1"]}
    _, frames = frames_of(JobPlan(nonce="n0", command=("-c", program), cluster=cluster))
    printed = json.loads("".join(text for kind, text in frames if kind == "out"))
    assert printed == {"cluster": cluster, "task": {"type": "chief", "index": 0}}


def test_program_reports_its_output_answer_and_exit_code() -> None:
    program = (
        "import os, sys; open(sys.argv[1], 'wb').write(b'4 2'); print(os.environ['TF_CONFIG']);"
        "print('x' * 100_000); sys.exit('bad')"
    )
    plan = JobPlan(nonce="n0", command=("-c", program, "{answer}"), cluster={"worker": ["a:1"]})
    code, frames = frames_of(plan)
    texts: dict[str, str] = {}
    for kind, text in frames:
        texts[kind] = texts.get(kind, "") + text
    assert (code, texts["end"], texts["err"]) == (1, "1", "bad\n")
    assert len(frames) > 5  # a long text comes in several
    config, long = texts["out"].splitlines()
    assert json.loads(config) == {"cluster": {"worker": ["a:1"]}}  # no task is the chief
    assert long == "x" * 100_000
    assert verified(texts["answer"], answer_key("n0")) == b"4 2"
    assert frames[-1][0] == "end"


def test_program_sends_heartbeats() -> None:
    plan = JobPlan(nonce="n0", command=("-c", "import time; time.sleep(1)"), heartbeat_s=0.02)
    _, frames = frames_of(plan)
    assert frames.count(("heartbeat", "")) >= 3


def test_key_of_an_answer_is_of_the_token_and_of_the_job(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert answer_key("n") == b"secret n"
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    (tmp_path / "token").write_text("of a file\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
    assert answer_key("n") == b"of a file n"
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert answer_key("n") == b" n"
