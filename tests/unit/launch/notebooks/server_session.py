"""Program: runs cells in a kernel of a real Jupyter server, and prints what they showed as JSON.

    python server_session.py FOLDER

It interrupts one cell through the server's REST API, and shuts the kernel down during another.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jupyter_client import BlockingKernelClient
from jupyter_core.paths import jupyter_runtime_dir

from tests.unit.launch.waiting import is_running, until

WAIT_S = 90
BEGIN = """
import json, os, pathlib, sys, time
import stratagem as sg
FACTOR = 3
def index():
    return json.loads(os.environ["TF_CONFIG"])["task"]["index"]
def report_pid(name):
    path = pathlib.Path(f"{name}-{index()}")
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)
"""
WORK = """
def work():
    for number in range(30):
        print(f"\\r\\x1b[2K{number} of 30", end="", flush=True)
        time.sleep(0.05)
    print("\\rdone\\x1b[?25h")
    return FACTOR * index()
sg.launch.spawn(work, workers=2)
"""
FAIL = """
def fail():
    missing = {}
    return missing["no such key"]  # here
sg.launch.spawn(fail, workers=2)
"""
WAIT = """
def wait():
    report_pid("{name}")
    time.sleep(1000)
sg.launch.spawn(wait, workers=2)
"""


@contextlib.contextmanager
def server(folder: str) -> Iterator[str]:
    """Runs a server and yields the address of its API."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = [f"--port={port}", "--allow-root", "--no-browser", "--IdentityProvider.token="]
    options += ["--ServerApp.disable_check_xsrf=True", f"--ServerApp.root_dir={folder}"]
    command = [sys.executable, "-m", "jupyter_server", *options]
    process = subprocess.Popen(command, stdout=sys.stderr)
    address = f"http://127.0.0.1:{port}/api"
    try:
        until(lambda: is_up(address))
        yield address
    finally:
        process.terminate()
        process.wait()


def is_up(address: str) -> bool:
    """Returns True once the server answers."""
    with contextlib.suppress(OSError):
        ask(address, "GET", "status")
        return True
    return False


def ask(address: str, method: str, path: str) -> Any:
    """Sends a request to the API."""
    data = b"{}" if method == "POST" else None
    request = urllib.request.Request(f"{address}/{path}", data=data, method=method)
    with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def pids(folder: str, name: str) -> list[int]:
    """Returns the process ids of the two workers once they have reported them."""
    paths = [Path(folder, f"{name}-{index}") for index in range(2)]
    until(lambda: all(path.exists() for path in paths))
    return [int(path.read_text()) for path in paths]


class Cells:
    """Runs cells in one kernel, and collects their outputs."""

    def __init__(self, kernel: str) -> None:
        path = Path(jupyter_runtime_dir(), f"kernel-{kernel}.json")
        self._client = BlockingKernelClient(connection_file=str(path))
        self._client.load_connection_file()
        self._client.start_channels()
        self._client.wait_for_ready(timeout=WAIT_S)

    def start(self, code: str) -> str:
        """Starts a cell without waiting for it."""
        return self._client.execute(code)

    def outputs(self, cell: str) -> list[dict[str, Any]]:
        """Waits for the end of a cell and returns its outputs."""
        found: list[dict[str, Any]] = []
        while True:
            message = self._client.get_iopub_msg(timeout=WAIT_S)
            if message["parent_header"].get("msg_id") != cell:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind not in ("status", "execute_input"):
                found.append({"kind": kind, **content})

    def run(self, code: str) -> list[dict[str, Any]]:
        """Runs a cell to its end."""
        return self.outputs(self.start(code))


def main() -> None:
    """Runs all cells."""
    folder = sys.argv[1]
    os.chdir(folder)
    found: dict[str, Any] = {}
    with server(folder) as address:
        kernel = ask(address, "POST", "kernels")["id"]
        cells = Cells(kernel)
        found["begin"] = cells.run(BEGIN)
        found["work"] = cells.run(WORK)
        found["fail"] = cells.run(FAIL)

        cell = cells.start(WAIT.format(name="interrupted"))
        workers = pids(folder, "interrupted")
        ask(address, "POST", f"kernels/{kernel}/interrupt")
        found["interrupted"] = cells.outputs(cell)
        found["gone_after_interrupt"] = not any(map(is_running, workers))
        found["after"] = cells.run("FACTOR + 1")

        cells.start(WAIT.format(name="killed"))
        workers = pids(folder, "killed")
        ask(address, "DELETE", f"kernels/{kernel}")
        until(lambda: not any(map(is_running, workers)))
        found["gone_after_shutdown"] = True
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
