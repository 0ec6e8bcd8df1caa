"""One Ray cluster for all tests of the folder, which `make test-external NAME=ray` runs.

Elsewhere these tests are not collected, so that a run of all tests does not need Ray Train.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stratagem.cluster.addresses import free_ports

_ROOT = Path(__file__).parents[2]
_LIBRARIES = ("pandas", "pyarrow", "ray", "tensorboardX")
_missing = [name for name in _LIBRARIES if importlib.util.find_spec(name) is None]
_START_LIMIT_S, _LIMIT_S = 300, 900

if _missing:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str | None:
    """Says what is missing where this folder is asked for by name."""
    if not _missing:
        return None
    return f"validation/ray needs {', '.join(_missing)}: run `make test-external NAME=ray`"


@pytest.fixture(scope="session")
def ray_variables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of programs on a Ray cluster of one machine, which ends with the tests."""
    gcs, jobs, client, http, grpc, agent, metrics = free_ports(7)
    variables = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "2",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(_ROOT / "src"),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    for name in ("XLA_FLAGS", "TF_CONFIG", "KERAS_BACKEND"):
        variables.pop(name, None)
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={gcs}", "--num-cpus=4"),
        *("--include-dashboard=true", f"--dashboard-port={jobs}"),
        f"--ray-client-server-port={client}",
        # Without fixed ports, the node waits 15 s for its agents to choose theirs, and then ends.
        *(f"--dashboard-agent-listen-port={http}", f"--dashboard-agent-grpc-port={grpc}"),
        *(f"--runtime-env-agent-port={agent}", f"--metrics-export-port={metrics}"),
        "--object-store-memory=200000000",
    ]
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with log.open("w") as file:
        head = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(_START_LIMIT_S * 10):
            if "Ray runtime started." in log.read_text():
                break
            assert head.poll() is None, log.read_text()
            with pytest.raises(subprocess.TimeoutExpired):
                head.wait(0.1)
        assert "Ray runtime started." in log.read_text()
        yield {
            **variables,
            "RAY_ADDRESS": f"127.0.0.1:{gcs}",
            "RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{jobs}",
        }
    finally:
        head.terminate()
        head.wait()


@pytest.fixture
def run(ray_variables: dict[str, str], tmp_path: Path) -> Callable[..., str]:
    """Runs a program on the cluster, in a folder of its own, and returns what it prints."""

    def run_program(*command: str, **variables: str) -> str:
        finished = subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={**ray_variables, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )
        assert finished.returncode == 0, finished.stdout
        return finished.stdout

    return run_program
