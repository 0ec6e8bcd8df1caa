"""HTTP client for jobs, with a head that answers like Ray's."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import threading
from collections.abc import Iterator

import pytest

from stratagem.errors import UnavailableError
from stratagem.launch.plan.ports import free_ports
from stratagem.launch.remote.jobs.jobs_client import JobsClient
from stratagem.launch.remote.jobs.local_code import pack


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
    package = pack(None, {}, more={"word.txt": b"hello"})
    jobs.upload(package.name, package.content)
    job = jobs.submit(
        "cat word.txt; exit 3", {"working_dir": f"gcs://{package.name}"}, stratagem="job"
    )
    assert asyncio.run(_read(jobs, job)) == "Runtime env is setting up.\nhello"
    state = jobs.state(job)
    assert (state.status, state.exit_code, state.has_ended) == ("FAILED", 3, True)


def test_job_can_be_stopped(fake_head) -> None:
    jobs = JobsClient(fake_head.url)
    package = pack(None, {})
    jobs.upload(package.name, package.content)
    runtime_env = {"working_dir": f"gcs://{package.name}"}
    job = jobs.submit("exec sleep 100", runtime_env, whose="mine")
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
    package = pack(None, {})
    jobs.upload(package.name, package.content)
    job = jobs.submit("exec sleep 100", {"working_dir": f"gcs://{package.name}"})
    fake_head.cuts = 1
    with pytest.raises(UnavailableError, match="the connection was lost"):
        asyncio.run(_read(jobs, job))


@pytest.mark.parametrize("url", ["ray://head:10001", "file:///etc", "head:8265"])
def test_only_dashboards_are_addresses(url: str) -> None:
    with pytest.raises(ValueError, match=f"sent to '{url}'"):
        JobsClient(url)
