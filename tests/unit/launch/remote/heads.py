"""Fake head that accepts jobs like Ray's, and runs them as processes of this machine."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web

from stratagem.cluster.addresses import free_ports

__all__ = ["TOKEN", "Head", "head"]

TOKEN = "0123456789abcdef" * 4
_POLL_S = 0.02


class Head:
    """What was sent to it, and the jobs that it runs.

    `machines` are the resources of the machines that it tells; `cuts` is how many connections to
    logs it breaks after their first part.
    """

    def __init__(self, folder: Path, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.machines: list[dict[str, float]] = []
        self.packages: dict[str, bytes] = {}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.stopped: list[str] = []
        self.metadata: dict[str, dict[str, str]] = {}
        self.cuts = 0
        self.num_uploads = 0
        self._folder = folder

    def application(self) -> web.Application:
        app = web.Application(client_max_size=2**30, middlewares=[_checked])
        app.add_routes(
            [
                web.get("/api/version", self._version),
                web.get("/api/v0/nodes", self._nodes),
                web.get("/api/packages/gcs/{name}", self._has),
                web.put("/api/packages/gcs/{name}", self._put),
                web.get("/api/jobs/", self._list),
                web.post("/api/jobs/", self._submit),
                web.get("/api/jobs/{job}", self._state),
                web.post("/api/jobs/{job}/stop", self._stop),
                web.get("/api/jobs/{job}/logs/tail", self._log),
            ]
        )
        return app

    def close(self) -> None:
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"ray_version": "2.60.0"})

    async def _nodes(self, request: web.Request) -> web.Response:
        nodes: list[dict[str, Any]] = [
            {"state": "ALIVE", "resources_total": one} for one in self.machines
        ]
        nodes.append({"state": "DEAD", "resources_total": {"worker:9": 1.0}})
        return web.json_response({"data": {"result": {"result": nodes}}})

    async def _has(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if request.match_info["name"] in self.packages else 404)

    async def _put(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        self.num_uploads += not name.startswith("stratagem_client")  # the renewals of a lease
        self.packages[name] = await request.read()
        return web.Response()

    async def _list(self, request: web.Request) -> web.Response:
        jobs = [self._told(job) for job in self.processes]
        # What a program of the cluster connects is a job without a name, to Ray.
        other = {"type": "DRIVER", "entrypoint": "", "submission_id": None, "status": "RUNNING"}
        return web.json_response([*jobs, other])

    async def _submit(self, request: web.Request) -> web.Response:
        wanted = await request.json()
        job = f"job{len(self.processes)}"
        self.metadata[job] = wanted["metadata"]
        folder = self._folder / job
        content = self.packages[wanted["runtime_env"]["working_dir"].removeprefix("gcs://")]
        folder.mkdir()
        zipfile.ZipFile(io.BytesIO(content)).extractall(folder)
        bin_folder = self._folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        python = bin_folder / "python3"
        if not python.exists():
            python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
            python.chmod(0o755)
        with (self._folder / f"{job}.log").open("ab") as log:
            log.write(b"Runtime env is setting up.\n")
            log.flush()
            self.processes[job] = subprocess.Popen(
                wanted["entrypoint"],
                shell=True,
                cwd=folder,
                env={
                    **os.environ,
                    **wanted["runtime_env"].get("env_vars", {}),
                    "PATH": f"{bin_folder}:{os.environ['PATH']}",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return web.json_response({"job_id": job, "submission_id": job})

    async def _state(self, request: web.Request) -> web.Response:
        return web.json_response(self._told(request.match_info["job"]))

    def _told(self, job: str) -> dict[str, Any]:
        """What Ray tells about a job, as far as its client requires or uses it."""
        code = self.processes[job].poll()
        status = "RUNNING" if code is None else "FAILED" if code else "SUCCEEDED"
        status = "STOPPED" if job in self.stopped and code is not None else status
        told = {"type": "SUBMISSION", "entrypoint": "", "submission_id": job, "status": status}
        return {**told, "driver_exit_code": code, "metadata": self.metadata[job]}

    async def _stop(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        self.stopped.append(job)
        os.killpg(self.processes[job].pid, signal.SIGTERM)
        return web.json_response({"stopped": True})

    async def _log(self, request: web.Request) -> web.WebSocketResponse:
        job = request.match_info["job"]
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        with (self._folder / f"{job}.log").open() as log:
            while True:
                has_ended = self.processes[job].poll() is not None
                if text := log.read(1000):
                    await socket.send_str(text)
                    if self.cuts:
                        self.cuts -= 1
                        request.transport.abort()
                        return socket
                elif has_ended:
                    return socket
                else:
                    await asyncio.sleep(_POLL_S)


@web.middleware
async def _checked(request: web.Request, handler: Any) -> web.StreamResponse:
    given = request.headers.get("Authorization", "")
    if given != f"Bearer {TOKEN}":
        return web.Response(status=403 if given else 401, text=json.dumps("no"))
    return await handler(request)


@contextlib.contextmanager
def head(folder: Path) -> Iterator[Head]:
    """Starts one; all that it has started ends with the block."""
    (port,) = free_ports(1)
    made = Head(folder, port)
    loop = asyncio.new_event_loop()
    runner = web.AppRunner(made.application(), access_log=None, shutdown_timeout=0.1)
    is_ready, is_over = threading.Event(), asyncio.Event()

    async def run() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        is_ready.set()
        await is_over.wait()
        await runner.cleanup()

    def serve() -> None:
        loop.run_until_complete(run())
        loop.close()

    thread = threading.Thread(target=serve)
    thread.start()
    assert is_ready.wait(120)
    try:
        yield made
    finally:
        made.close()
        loop.call_soon_threadsafe(is_over.set)
        thread.join()
