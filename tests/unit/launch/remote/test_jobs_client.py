"""Jobs as their client sees them: what is sent, requests, and the log that is followed."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import importlib
import io
import os
import sys
import threading
import types
import zipfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobStatus

from stratagem.cluster.addresses import free_ports
from stratagem.errors import UnavailableError
from stratagem.launch.remote import jobs_client
from stratagem.launch.remote.jobs_client import (
    JobOutput,
    JobResult,
    JobsClient,
    Lease,
    follow,
    local_modules,
    pack,
)
from stratagem.launch.remote.protocol import FrameWriter, renewal_s
from tests.unit.launch.remote.answering import listening

# Files that are sent with a program.


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    """A script with modules, and what is not meant."""
    for name in (
        "project/train.py",
        "project/models/__init__.py",
        "project/models/deep/wide.py",
        "project/data/raw/big.bin",
        "project/data/small.csv",
        "project/.git/config",
        "project/.hidden",
        "project/models/__pycache__/wide.cpython-311.pyc",
        "project/env/pyvenv.cfg",
        "project/env/lib/python.py",
        "elsewhere/shared_layers/__init__.py",
        "elsewhere/shared_layers/dense.py",
        "elsewhere/single_file.py",
        "elsewhere/spaces/inner/deep.py",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"NAME = {name!r}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    return tmp_path


def _names(package: bytes) -> list[str]:
    return sorted(zipfile.ZipFile(io.BytesIO(package)).namelist())


def test_folder_is_sent_without_what_is_not_meant(project) -> None:
    package = pack(project / "project", {}, more={"call": b"bytes"})
    assert _names(package) == [
        "call",
        "data/raw/big.bin",
        "data/small.csv",
        "models/__init__.py",
        "models/deep/wide.py",
        "train.py",
    ]
    archive = zipfile.ZipFile(io.BytesIO(package))
    assert archive.read("train.py") == (project / "project/train.py").read_bytes()
    assert archive.read("call") == b"bytes"


def test_patterns_leave_files_out_by_name_and_by_path(project) -> None:
    package = pack(project / "project", {}, excludes=["*.csv", "data/raw/"])
    assert _names(package) == ["models/__init__.py", "models/deep/wide.py", "train.py"]


def test_modules_of_nobody_else_are_found(project, monkeypatch) -> None:
    for name in ("shared_layers", "shared_layers.dense", "single_file", "spaces.inner.deep"):
        importlib.import_module(name)
    try:
        found = local_modules()
    finally:
        for name in [
            n for n in sys.modules if n.startswith(("shared_layers", "single_", "spaces"))
        ]:
            del sys.modules[name]
    elsewhere = project / "elsewhere"
    assert {name: found.get(name) for name in ("shared_layers", "single_file", "spaces")} == {
        "shared_layers": elsewhere / "shared_layers",
        "single_file": elsewhere / "single_file.py",
        "spaces": elsewhere / "spaces",
    }
    assert not {"numpy", "json", "stratagem", "__main__", "pytest", "sys"} & found.keys()
    assert _names(pack(None, {name: found[name] for name in ("shared_layers", "single_file")})) == [
        "shared_layers/__init__.py",
        "shared_layers/dense.py",
        "single_file.py",
    ]


def test_file_of_the_folder_wins_over_a_module_of_its_name(project) -> None:
    (project / "project" / "single_file.py").write_text("HERE = 1\n")
    package = pack(project / "project", {"single_file": project / "elsewhere/single_file.py"})
    archive = zipfile.ZipFile(io.BytesIO(package))
    assert archive.read("single_file.py") == b"HERE = 1\n"


def test_same_files_are_the_same_package(project) -> None:
    first = pack(project / "project", {})
    (project / "project" / "train.py").touch()
    assert pack(project / "project", {}) == first
    (project / "project" / "train.py").write_text("NAME = 0\n")
    assert pack(project / "project", {}) != first


def test_too_large_folder_names_what_is_large(project, monkeypatch) -> None:
    (project / "project/data/raw/big.bin").write_bytes(bytes(5000))
    monkeypatch.setenv("STRATAGEM_UPLOAD_LIMIT_BYTES", "4000")
    with pytest.raises(ValueError, match=r"files are larger than 4,000 bytes") as raised:
        pack(project / "project", {})
    assert "data (5,0" in str(raised.value)
    assert "STRATAGEM_UPLOAD_LIMIT_BYTES" in str(raised.value)


# Requests, with a head that answers like Ray's.


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
    return jobs.submit(command, package, {"PLACE": "there"}, **metadata)


def test_cluster_names_its_machines(fake_head, monkeypatch) -> None:
    fake_head.machines = [{"CPU": 2.0, "chief:0": 1.0}, {"ps:0": 1.0}]
    monkeypatch.setenv("RAY_ADDRESS", "another:6379")  # which Ray's client would obey
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://another:8265")
    jobs = JobsClient(fake_head.url + "/")
    jobs.connect()
    assert jobs.machines() == fake_head.machines


def test_job_runs_and_its_log_is_followed_to_its_end(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "cat word.txt; echo $PLACE; exit 3", stratagem="job")
    assert asyncio.run(_read(jobs, job)) == "Runtime env is setting up.\nhellothere\n"
    details = jobs.details(job)
    assert (details.status, details.driver_exit_code) == ("FAILED", 3)


def test_job_can_be_stopped(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "exec sleep 100", whose="mine")
    assert not jobs.details(job).status.is_terminal()
    assert jobs.running() == {job: {"whose": "mine"}}
    jobs.stop(job)
    fake_head.processes[job].wait(timeout=120)
    assert jobs.details(job).status == "STOPPED"
    assert jobs.running() == {}


@pytest.mark.parametrize("token", ["", "f" * 64])
def test_stranger_is_not_let_in(fake_head, token) -> None:
    with pytest.raises(PermissionError, match="refused this client") as raised:
        JobsClient(fake_head.url, token).connect()
    assert "RAY_AUTH_TOKEN" in str(raised.value)
    assert token not in str(raised.value) or not token


def test_cluster_that_is_not_there_is_unavailable() -> None:
    jobs = JobsClient(f"http://127.0.0.1:{free_ports(1)[0]}", "token")
    with pytest.raises(UnavailableError, match="is not available"):
        jobs.connect()
    with pytest.raises(UnavailableError, match="is not available"):
        asyncio.run(_read(jobs, "job0"))


def test_answer_that_is_none_of_ray_is_reported() -> None:
    with (
        _answering(b"<html>") as url,
        pytest.raises(UnavailableError, match=f"cluster at {url} is not available"),
    ):
        JobsClient(url, "").connect()
    with _answering(b"broken", 500) as url, pytest.raises(UnavailableError, match="500"):
        JobsClient(url, "").connect()


def test_connection_that_is_cut_is_reported(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    job = _submitted(jobs, "exec sleep 100")
    fake_head.cuts = 1
    with pytest.raises(UnavailableError, match="is not available"):
        asyncio.run(_read(jobs, job))


def test_head_that_accepts_and_does_not_answer_is_unavailable(monkeypatch) -> None:
    monkeypatch.setattr(jobs_client, "_REQUEST_S", 0.2)
    with listening() as stopped, pytest.raises(UnavailableError, match="is not available"):
        JobsClient(f"http://{stopped}", "token").connect()


@pytest.mark.parametrize("url", ["ray://head:10001", "file:///etc", "head:8265"])
def test_only_dashboards_are_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=f"sent to '{url}'"):
        JobsClient(url)


# Lease of a client, renewed.


class Renewals:
    """Renewals of a lease, and whether they arrive."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.is_reached = True
        self.has_arrived = threading.Semaphore(0)

    def renew(self, nonce: str, number: int) -> None:
        if not self.is_reached:
            raise UnavailableError("not now")
        self.numbers.append(number)
        self.has_arrived.release()


def test_lease_counts_up_and_tries_again_what_has_failed() -> None:
    renewals = Renewals()
    with Lease(renewals, "n", 0.06):
        for _ in range(2):
            assert renewals.has_arrived.acquire(timeout=120)
        renewals.is_reached = False
        renewals.is_reached = True
        for _ in range(2):
            assert renewals.has_arrived.acquire(timeout=120)
    assert renewals.numbers == list(range(1, len(renewals.numbers) + 1))


def test_renewals_come_before_ray_forgets_them() -> None:
    assert renewal_s(60.0) == 10.0
    assert renewal_s(24 * 3600.0) == 60.0  # of the 600 s that Ray keeps one


# The log of a job, followed.


class Logged:
    """A job whose log is known; each reading of it is one of `readings`, None breaks off."""

    def __init__(self, readings: list[list[str | None]], *states: str | None) -> None:
        self.readings = readings
        self.states = list(states)

    def details(self, job: str) -> types.SimpleNamespace:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if state is None:
            raise UnavailableError("nobody there")
        code = 1 if state == "FAILED" else None
        return types.SimpleNamespace(status=JobStatus(state), message="m", driver_exit_code=code)

    async def log(self, job: str) -> AsyncIterator[str]:
        for text in self.readings.pop(0) if self.readings else []:
            if text is None:
                raise UnavailableError("broken")
            yield text


def _log(path: Path, *frames: tuple[str, str, str]) -> str:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    writer = FrameWriter("n", descriptor)
    for kind, text, task in frames:
        writer.write(kind, text, task)
    os.close(descriptor)
    return path.read_text()


@pytest.fixture(autouse=True)
def quick(monkeypatch) -> None:
    monkeypatch.setattr(jobs_client, "_RETRY_S", 0.01)


def test_output_answer_and_exit_code_arrive(tmp_path, capsys) -> None:
    text = _log(
        tmp_path / "log",
        *(("heartbeat", "", ""), ("started", "", ""), ("out", "1\r2\n", "")),
        ("err", "careful\n", ""),
        *(("note", "the client is late", ""), ("answer", "abc", ""), ("end", "-9", "")),
    )
    jobs = Logged([[text]], "RUNNING")
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(-9, "abc", "the client is late")
    printed = capsys.readouterr()
    assert printed.out == "1\r2\n"
    assert printed.err == "careful\nthe client is late\n"


def test_job_is_heard_at_its_first_frame_however_late_it_starts(tmp_path) -> None:
    """Its client renews from then on: Ray forgets earlier renewals before they are looked for."""
    heard: list[str] = []
    text = _log(tmp_path / "log", ("heartbeat", "", ""), ("started", "", ""), ("end", "0", ""))

    class Late(Logged):
        def details(self, job: str) -> types.SimpleNamespace:
            heard.append("asked")
            return super().details(job)

    jobs = Late([["Ray waits\n", None], [text]], "PENDING", "RUNNING")
    result = follow(jobs, "job", "n", JobOutput([]), on_heard=lambda: heard.append("heard"))
    assert result == JobResult(0, "", "")
    assert heard[0] == "asked"
    assert heard.count("heard") == 1


def test_traceback_of_several_tasks_is_shown_once(tmp_path, capsys) -> None:
    error = 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: no\n'
    text = _log(
        tmp_path / "log",
        *(("started", "", ""), ("err", error, "worker 0"), ("err", error, "worker 1")),
        ("end", "1", ""),
    )
    follow(Logged([[text]], "RUNNING"), "job", "n", JobOutput(["worker 0", "worker 1"]))
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1] == "[worker 1] ValueError: no (the same traceback as worker 0)"
    assert len(printed) == 4


def test_log_is_read_again_where_the_connection_broke(tmp_path, capsys) -> None:
    text = _log(tmp_path / "log", ("started", "", ""), ("out", "once\n", ""), ("end", "0", ""))
    cut = text.index("once") + 2
    jobs = Logged([[text[:cut], None], [None], [text]], "RUNNING", None, "RUNNING")
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")
    assert capsys.readouterr().out == "once\n"


def test_log_of_a_job_that_ended_meanwhile_is_read_to_its_end(tmp_path, capsys) -> None:
    text = _log(tmp_path / "log", ("started", "", ""), ("out", "last\n", ""), ("end", "0", ""))
    jobs = Logged([[text[: text.index("last")], None], [text]], "SUCCEEDED")
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")
    assert capsys.readouterr().out == "last\n"
    jobs = Logged([[None], [None]], "FAILED")
    with pytest.raises(UnavailableError, match="could not start the program"):
        follow(jobs, "job", "n", JobOutput([]))


def test_job_that_was_stopped_has_an_exit_code_and_any_can_be_left() -> None:
    def followed(state: str, *is_left: Any) -> JobResult | None:
        return follow(Logged([["Runtime env"]], state), "job", "n", JobOutput([]), *is_left)

    assert followed("STOPPED") == JobResult(1, "", "")
    assert followed("RUNNING", lambda: True) is None


def test_job_that_starts_late_is_waited_for(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.05")
    text = _log(tmp_path / "log", ("started", "", ""), ("end", "0", ""))
    jobs = Logged([[None]] * 20 + [[text]], "PENDING")
    assert follow(jobs, "job", "n", JobOutput([])) == JobResult(0, "", "")


class Quiet(Logged):
    """A job whose log stays open and says nothing, since the head's source of it is gone."""

    async def log(self, job: str) -> AsyncIterator[str]:
        for text in self.readings.pop(0) if self.readings else [""]:
            assert text is not None
            yield text
        await asyncio.sleep(60.0)


@pytest.mark.parametrize(
    ("kind", "readings", "state", "words"),
    [
        (
            Logged,
            [["Runtime env is setting up.\nNo module named stratagem\n"]],
            "FAILED",
            r"could not start the program(?s:.)*No module named stratagem",
        ),
        (
            Logged,
            [[None]] * 1000,
            None,
            r"has not responded about job job(?s:.)*STRATAGEM_PEER_TIMEOUT_S",
        ),
        # The head also answers for jobs that no machine can start.
        *(
            (
                Logged,
                [reading] * 10_000,
                "PENDING",
                r"has not started for 0\.3 s(?s:.)*STRATAGEM_JOIN_TIMEOUT_S",
            )
            for reading in ([""], [None], ["", None], ["Runtime env\n"])
        ),
        # The program was stopped after its first frames: its cluster answers.
        (Quiet, None, "RUNNING", r"no heartbeat for 0\.4 s(?s:.)*twice STRATAGEM_PEER_TIMEOUT_S"),
    ],
    ids=["cannot start", "silent", *(f"pending {number}" for number in range(4)), "stopped"],
)
def test_job_that_is_lost_is_named(monkeypatch, tmp_path, kind, readings, state, words) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.2")
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "0.3")
    frames = (("heartbeat", "", ""), ("started", "", ""), ("out", "1\n", ""))
    readings = readings or [[_log(tmp_path / "log", *frames)]]
    with pytest.raises(UnavailableError, match=words):
        follow(kind([*readings], state), "job", "n", JobOutput([]))


def _last_of(jobs: Logged) -> object:
    """Reads a log that may be quiet for 0.1 s; returns what comes after its text."""
    with jobs_client._log_of(jobs, "job", 0.1) as log:
        while isinstance(item := log.get(timeout=120.0), str):
            pass
    return item


def test_end_of_a_job_with_a_quiet_log_is_noticed() -> None:
    ended = _last_of(Quiet([["text"]], "RUNNING", "FAILED"))
    assert getattr(ended, "driver_exit_code", None) == 1


def test_quiet_log_of_a_cluster_that_does_not_answer_is_lost() -> None:
    lost = _last_of(Quiet([["text"]], None))
    assert isinstance(lost, UnavailableError)
    assert "has not responded about job job for 0.1 s: nobody there" in str(lost)


def test_quiet_connection_is_made_again() -> None:
    """One that died may not be reported, as when a laptop changes its network."""
    with jobs_client._log_of(Quiet([["first"], ["again"]], "RUNNING"), "job", 0.1) as log:
        found: list[str] = []
        while "again" not in found:
            found.append(log.get(timeout=120.0))
    assert "first" in found
