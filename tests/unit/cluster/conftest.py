"""Fixtures: no launcher variables, and a fake metadata server of Google Cloud."""

from __future__ import annotations

import http.server
import os
import threading
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


_TEXTS = {
    "project/project-id": "my-project",
    "instance/zone": "projects/1/zones/us-central2-b",
    "instance/attributes/agent-worker-number": "1",
}


class _Metadata(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        text = _TEXTS.get(self.path.removeprefix("/computeMetadata/v1/"))
        allowed = self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if text and allowed else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, format: str, *args: object) -> None: ...


@pytest.fixture
def metadata_server(variables) -> Iterator[None]:
    """A fake of Google Cloud's server, for the second host of a TPU."""
    server = http.server.HTTPServer(("127.0.0.1", 0), _Metadata)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    variables(GCE_METADATA_HOST=f"127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    thread.join()
    server.server_close()
