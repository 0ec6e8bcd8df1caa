"""Program run as several tasks; actors are objects of this process, called in threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import http.server
import json
import os
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

from stratagem.cluster.addresses import free_ports
from stratagem.errors import UnavailableError
from stratagem.launch.remote.jobs import job, jobs_client, lockstep
from stratagem.launch.remote.jobs.job_log import (
    FrameReader,
    FrameWriter,
    LogFrame,
    signed,
    verified,
)
from stratagem.launch.remote.jobs.jobs_client import JobsClient, Lease, LeaseWatch
from stratagem.launch.remote.jobs.local_code import pack
from stratagem.launch.remote.jobs.lockstep import JobPlan, answer_key, run_in_lockstep
from tests.fuzzing import JSON, fuzz


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

        return types.SimpleNamespace(remote=lambda *arguments: self._pool.submit(call, *arguments))


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

    def get(self, asked: Any, timeout: float | None = None) -> Any:
        many = asked if isinstance(asked, list) else [asked]
        got = [one.result(timeout or 30.0) for one in many]
        return got if isinstance(asked, list) else got[0]

    def wait(self, asked: list[Any], num_returns: int, timeout: float) -> Any:
        when = concurrent.futures.FIRST_COMPLETED
        if num_returns > 1:
            when = concurrent.futures.ALL_COMPLETED
        done, rest = concurrent.futures.wait(asked, timeout, when)
        return list(done), list(rest)

    def kill(self, actor: Actor) -> None:
        self.killed.append(actor)


@pytest.fixture
def fake_ray(monkeypatch):
    with concurrent.futures.ThreadPoolExecutor() as pool:
        made = FakeRay(pool)
        monkeypatch.setattr(lockstep, "load_ray", lambda: made)
        monkeypatch.setattr(lockstep, "watched_addresses", dict)
        yield made


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
        ended = run_in_lockstep(plan, frames, is_over or threading.Event())
    finally:
        os.close(descriptor)
    return ended, list(FrameReader("n").feed(path.read_text()))


_NAMES = ("chief 0", "worker 0")
_CONFIG = """
import json, os, sys
config = json.loads(os.environ["TF_CONFIG"])
print(json.dumps(config), flush=True)
open(sys.argv[1], "w").write(config["task"]["type"])
"""


def test_answer_is_that_of_the_task_that_is_named(fake_ray, tmp_path) -> None:
    plan = dataclasses.replace(_plan(_CONFIG), answers=("worker", 0))
    (code, answer), _ = _run(JobPlan.from_json(plan.to_json()), tmp_path / "log")
    assert (code, answer) == (0, b"worker")


def test_each_task_has_its_place_in_a_cluster_of_free_ports(fake_ray, tmp_path) -> None:
    (code, answer), frames = _run(_plan(_CONFIG), tmp_path / "log")
    assert (code, answer) == (0, b"chief")
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
    class LostLater(lockstep.TaskActor):
        def next(self, timeout_s: float) -> Any:
            fake_ray.actors[1].is_lost = True
            return super().next(timeout_s)

    monkeypatch.setattr(lockstep, "TaskActor", LostLater)
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    fake_ray.actors[1].made.close()
    assert ended == (1, b"")
    assert "The machine of worker 0 was lost: the node died" in frames[-1].text


def test_lost_ray_ends_the_job_with_its_error(fake_ray, tmp_path, monkeypatch) -> None:
    class LostAtOnce(contextlib.nullcontext):
        def __init__(self, addresses: Any, on_lost: Any) -> None:
            super().__init__()
            on_lost(RuntimeError(f"Ray's GCS is lost: {addresses}"))

    monkeypatch.setattr(lockstep, "RayWatch", LostAtOnce)
    monkeypatch.setattr(lockstep, "watched_addresses", lambda: {"GCS": "a:1"})
    ended, frames = _run(_plan("import time; time.sleep(100)"), tmp_path / "log")
    for actor in fake_ray.actors:
        actor.made.close()
    assert ended == (1, b"")
    assert frames[-1].text == "Ray's GCS is lost: {'GCS': 'a:1'}\n"
    assert fake_ray.killed == []  # Ray would not answer


# HTTP client for jobs, with a head that answers like Ray's.


@contextlib.contextmanager
def _answering(content: bytes, code: int = 200) -> Iterator[str]:
    """A server that says one thing, whatever it is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def _read(jobs: JobsClient, job: str) -> str:
    return "".join([text async for text in jobs.log(job)])


def _submitted(jobs: JobsClient, command: str, **metadata: str) -> str:
    """Sends a command with a file, and returns its job."""
    package = pack(None, {}, more={"word.txt": b"hello"})
    jobs.upload(package.name, package.content)
    return jobs.submit(command, {"working_dir": f"gcs://{package.name}"}, **metadata)


def test_cluster_tells_its_version_and_its_machines(fake_head) -> None:
    fake_head.machines = [{"CPU": 2.0, "chief:0": 1.0}, {"ps:0": 1.0}]
    jobs = JobsClient(fake_head.url + "/")
    assert jobs.version() == "2.60.0"
    assert jobs.resources() == fake_head.machines


def test_package_is_there_once_it_was_uploaded(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    assert not jobs.has_package("a.zip")
    jobs.upload("a.zip", b"content")
    assert jobs.has_package("a.zip")
    assert fake_head.packages == {"a.zip": b"content"}


def test_job_runs_and_its_log_is_followed_to_its_end(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "cat word.txt; exit 3", stratagem="job")
    assert asyncio.run(_read(jobs, job)) == "Runtime env is setting up.\nhello"
    state = jobs.state(job)
    assert (state.status, state.exit_code, state.has_ended) == ("FAILED", 3, True)


def test_job_can_be_stopped(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "exec sleep 100", whose="mine")
    assert not jobs.state(job).has_ended
    assert jobs.running() == {job: {"whose": "mine"}}
    jobs.stop(job)
    fake_head.processes[job].wait(timeout=120)
    assert jobs.state(job).status == "STOPPED"
    assert jobs.running() == {}


@pytest.mark.parametrize("token", ["", "f" * 64])
def test_stranger_is_not_let_in(fake_head, token) -> None:
    with pytest.raises(PermissionError, match="refused this client") as raised:
        JobsClient(fake_head.url, token).version()
    assert "RAY_AUTH_TOKEN" in str(raised.value)
    assert token not in str(raised.value) or not token


def test_cluster_that_is_not_there_is_unavailable() -> None:
    jobs = JobsClient(f"http://127.0.0.1:{free_ports(1)[0]}", "token")
    with pytest.raises(UnavailableError, match="is not available"):
        jobs.version()
    with pytest.raises(UnavailableError, match="is not available"):
        asyncio.run(_read(jobs, "job0"))


def test_answer_that_is_none_of_ray_is_reported() -> None:
    with (
        _answering(b"<html>") as url,
        pytest.raises(UnavailableError, match="is not available") as raised,
    ):
        JobsClient(url, "").version()
    assert "<html>" in str(raised.value)
    with _answering(b"broken", 500) as url, pytest.raises(UnavailableError, match="500"):
        JobsClient(url, "").version()


def test_connection_that_is_cut_is_reported(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "exec sleep 100")
    fake_head.cuts = 1
    with pytest.raises(UnavailableError, match="the connection was lost"):
        asyncio.run(_read(jobs, job))


@pytest.mark.parametrize("url", ["ray://head:10001", "file:///etc", "head:8265"])
def test_only_dashboards_are_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=f"sent to '{url}'"):
        JobsClient(url)


# Lease of a client, renewed and expired.


class Packages:
    """What was uploaded, in memory."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.is_reached = True
        self.has_uploaded = threading.Semaphore(0)

    def has_package(self, name: str) -> bool:
        if not self.is_reached:
            raise UnavailableError("not now")
        return name in self.names

    def upload(self, name: str, content: bytes) -> None:
        if not self.is_reached:
            raise UnavailableError("not now")
        self.names.add(name)
        self.has_uploaded.release()


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(jobs_client.time, "monotonic", lambda: now[0])
    return now


def test_client_that_renews_is_alive_and_one_that_stops_is_not(clock) -> None:
    packages = Packages()
    watch = LeaseWatch(packages, "n", 30.0)
    assert watch.pause_s == 5.0
    packages.upload("stratagem_client_n_1.zip", b"")
    clock[0] += 29
    assert not watch.is_over()
    packages.upload("stratagem_client_n_2.zip", b"")
    packages.upload("stratagem_client_n_3.zip", b"")
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 29
    assert not watch.is_over()
    packages.upload("stratagem_client_other_4.zip", b"")
    clock[0] += 2
    assert watch.is_over()


def test_time_in_which_nobody_can_be_heard_does_not_count(clock) -> None:
    packages = Packages()
    watch = LeaseWatch(packages, "n", 30.0)
    packages.is_reached = False
    clock[0] += 100
    assert not watch.is_over()
    packages.is_reached = True
    clock[0] += 29
    assert not watch.is_over()
    clock[0] += 2
    assert watch.is_over()


def test_lease_counts_up_and_tries_again_what_has_failed() -> None:
    packages = Packages()
    with Lease(packages, "n", 0.06):
        for _ in range(2):
            assert packages.has_uploaded.acquire(timeout=120)
        packages.is_reached = False
        packages.is_reached = True
        for _ in range(2):
            assert packages.has_uploaded.acquire(timeout=120)
    assert {f"stratagem_client_n_{number}.zip" for number in (1, 2, 3, 4)} <= packages.names
    numbers = {int(name.split("_")[-1].removesuffix(".zip")) for name in packages.names}
    assert numbers == set(range(1, max(numbers) + 1))


def test_lease_of_a_cluster_that_is_not_reached_ends_in_order() -> None:
    packages = Packages()
    packages.is_reached = False
    with Lease(packages, "n", 0.06):
        pass
    assert packages.names == set()


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


def test_long_text_comes_in_several_frames(log) -> None:
    text = "x\n" * 50_000
    frames = list(FrameReader("n0").feed(_written(log, ("out", text, ""))))
    assert len(frames) > 1
    assert "".join(frame.text for frame in frames) == text


def test_log_that_is_read_again_is_shown_once(log) -> None:
    text = _written(log, ("out", "a", ""), ("out", "b", ""), ("out", "c", ""))
    reader = FrameReader("n0")
    cut = text.index("b") + 1
    first = list(reader.feed(text[:cut]))
    again = list(reader.feed("\n" + text))
    assert [frame.text for frame in first + again] == ["a", "b", "c"]


def test_frame_of_another_job_is_none(log) -> None:
    reader = FrameReader("n1")
    assert list(reader.feed(_written(log, ("answer", "x", "")))) == []


def test_answer_is_known_by_its_signature() -> None:
    text = signed(b"content", b"key")
    assert verified(text, b"key") == b"content"
    for wrong in (signed(b"content", b"other"), signed(b"other", b"key")[:44] + text[44:]):
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


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({}, ""),
        ({"worker": ["a:1"]}, {"cluster": {"worker": ["a:1"]}}),
        (
            {"chief": ["a:1"], "ps": ["b:1"]},
            {
                "cluster": {"chief": ["a:1"], "ps": ["b:1"]},
                "task": {"type": "chief", "index": 0},
            },
        ),
    ],
    ids=["no cluster", "workers", "chief"],
)
def test_program_on_the_head_is_the_chief_of_its_cluster(cluster, expected) -> None:
    plan = JobPlan(nonce="n0", command=("-c", ""), cluster=cluster)
    config = job._config(plan)
    assert (json.loads(config) if config else config) == expected


def frames_of(plan: JobPlan) -> tuple[int, list[tuple[str, str]]]:
    """Runs a job, and returns its exit code and what its frames report."""
    command = [sys.executable, "-m", "stratagem.launch.remote.jobs.job", plan.to_json()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reader = FrameReader(plan.nonce)
    return done.returncode, [(frame.kind, frame.text) for frame in reader.feed(done.stdout)]


def test_program_reports_its_output_answer_and_exit_code() -> None:
    program = (
        "import os, sys; open(sys.argv[1], 'wb').write(b'4 2'); print(os.environ['TF_CONFIG']);"
        "sys.exit(3)"
    )
    plan = JobPlan(nonce="n0", command=("-c", program, "{answer}"), cluster={"worker": ["a:1"]})
    code, frames = frames_of(plan)
    texts: dict[str, str] = {}
    for kind, text in frames:
        texts[kind] = texts.get(kind, "") + text
    assert (code, texts["end"]) == (3, "3")
    assert json.loads(texts["out"]) == {"cluster": {"worker": ["a:1"]}}
    assert verified(texts["answer"], answer_key("n0")) == b"4 2"
    assert frames[-1][0] == "end"


def test_another_python_is_refused_before_the_program_starts() -> None:
    code, frames = frames_of(JobPlan(nonce="n0", command=("-c", "print(1)"), python="2.7"))
    assert code == 1
    assert [kind for kind, _ in frames] == ["note", "end"]
    own = ".".join(map(str, sys.version_info[:2]))
    words = f"The client has Python 2.7, but this cluster has Python {own}"
    assert words in frames[0][1]
    assert "\nExpected the same version" in frames[0][1]


def test_program_sends_heartbeats() -> None:
    plan = JobPlan(nonce="n0", command=("-c", "import time; time.sleep(1)"), heartbeat_s=0.02)
    _, frames = frames_of(plan)
    assert frames.count(("heartbeat", "")) >= 3
    assert ("heartbeat", "") not in frames_of(JobPlan(nonce="n0", command=("-c", "")))[1]


# Job plans as JSON.


def test_plan_survives_as_text() -> None:
    plan = JobPlan(
        nonce="n",
        command=("train.py", "--name", "it's"),
        cluster={"worker": ["a:1"]},
        tasks=(("worker", 0),),
        head="a:1",
        url="http://a:2",
        lease_s=3.5,
        heartbeat_s=0.5,
    )
    assert JobPlan.from_json(plan.to_json()) == plan


def test_program_learns_where_ray_is_where_that_is_known() -> None:
    alone = JobPlan(nonce="n", command=())
    assert alone.variables() == {"STRATAGEM_REMOTE_JOB": "n", "PYTHONUNBUFFERED": "1"}
    assert JobPlan(nonce="n", command=(), head="a:1").variables()["RAY_ADDRESS"] == "a:1"


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
