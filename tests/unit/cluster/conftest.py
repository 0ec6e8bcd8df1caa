"""No launcher variables, and a fake metadata server of Google Cloud."""

from __future__ import annotations

import http.server
import os
import threading
import urllib.parse
from collections.abc import Iterator

import pytest

from stratagem import environment

_PREFIXES = (
    "JAX_COORDINATOR",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "KUBE_",
    "LOCAL_",
    "MASTER_",
    "MEGASCALE_",
    "OMPI_",
    "PET_",
    "PMIX_",
    "SLURM",
    "SM_",
    "TORCHELASTIC_",
    "TPU_",
)
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "GCE_METADATA_HOST",
    "GCE_METADATA_IP",
    "RANK",
    "TF_CONFIG",
    "WORLD_SIZE",
)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in list(os.environ):
        if name in _NAMES or name.startswith(_PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setattr(environment, "_assigned_gpus", {})
    # A test may write it; monkeypatch then knows what to go back to.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")


@pytest.fixture
def variables(monkeypatch):
    """Sets environment variables passed by keyword."""

    def set_all(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)

    return set_all


class MetadataServer:
    """Answers a request at once, or with `wait_for_change` on a change of its value."""

    def __init__(self, values: dict[str, str]) -> None:
        self.values = values
        self.requests: list[tuple[str, bool]] = []
        self.num_failing = 0
        self.waits = True
        self.changed = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def let_go(self) -> None:
        with self.changed:
            self.waits = False
            self.changed.notify_all()

    def wait_for_requests(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.requests) >= number, 60)

    def answer(self, address: str, flavor: str | None) -> tuple[int, str]:
        url = urllib.parse.urlsplit(address)
        key = url.path.removeprefix("/computeMetadata/v1/")
        query = urllib.parse.parse_qs(url.query)
        waits = query.get("wait_for_change") == ["true"]
        with self.changed:
            self.requests.append((key, waits))
            self.changed.notify_all()
            if flavor != "Google" or key not in self.values:
                return 403, ""
            if waits and self.num_failing:
                self.num_failing -= 1
                return 503, ""
            before = self.values[key]
            if waits:
                limit_s = float(query["timeout_sec"][0])
                self.changed.wait_for(lambda: self.values[key] != before or not self.waits, limit_s)
            return 200, self.values[key]


def join_watchers() -> None:
    """Waits for the threads of notice sources that have been stopped."""
    for thread in threading.enumerate():
        if thread.name.startswith("stratagem-notice"):
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def metadata_server(variables) -> Iterator[MetadataServer]:
    """A fake of Google Cloud's server, for the second host of a TPU."""
    answers = MetadataServer(
        {
            "project/project-id": "my-project",
            "instance/zone": "projects/1/zones/us-central2-b",
            "instance/attributes/agent-worker-number": "1",
            "instance/preempted": "FALSE",
            "instance/maintenance-event": "NONE",
        }
    )

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answers.answer(self.path, self.headers["Metadata-Flavor"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    variables(GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}")
    yield answers
    answers.let_go()
    join_watchers()
    server.shutdown()
    thread.join()
    server.server_close()
