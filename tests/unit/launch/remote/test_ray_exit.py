"""Programs that have loaded Ray, and end by Ctrl-C or after a process of Ray was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.launch.remote.heads import TOKEN
from tests.unit.launch.remote.living import descendants, wait_for_end

pytest.importorskip("ray")

LOADS_RAY = "from stratagem.launch.remote.ray_cluster import load_ray\nload_ray()\n"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("raise ValueError", 1),
        ("try:\n    raise KeyboardInterrupt\nexcept KeyboardInterrupt:\n    pass", 0),
    ],
)
def test_only_an_interrupt_ends_a_program_by_its_signal(ending, code) -> None:
    program = [sys.executable, "-c", LOADS_RAY + ending]
    ended = subprocess.run(program, capture_output=True, timeout=120, check=False)
    assert ended.returncode == code, ended.stderr.decode()


LAUNCHED = """
import sys
import stratagem as sg
resolver = sg.cluster.detect()
if resolver.task_type != "chief":
    sg.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id).join()
    sys.exit()
coordinator = sg.coordinator.ClusterCoordinator(sg.ParameterServerStrategy(resolver))
while True:
    coordinator.schedule(int)
    coordinator.join()
    print("stepping", flush=True)
"""


@pytest.mark.slow
def test_interrupted_launch_of_servers_exits_with_130_and_leaves_nothing(tmp_path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LAUNCHED)
    options = ["--chief", "--workers", "1", "--ps", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "stratagem", "launch", *options, str(script)],
        env={**os.environ, "RAY_AUTH_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as launcher:
        shown = [next((line for line in launcher.stdout if "stepping" in line), "")]
        processes = descendants(launcher.pid)
        os.killpg(launcher.pid, signal.SIGINT)  # as the terminal does
        shown += launcher.stdout.readlines()
    assert launcher.returncode == 128 + signal.SIGINT, "".join(shown[-50:])
    assert "stepping" in shown[0]
    assert wait_for_end(processes, timeout_s=90.0) == set()


def _run(folder: Path, killed: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.unit.launch.remote.lost_cluster", str(folder), killed]
    # `weights` is made before the fixture that all tests have removes these variables.
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("STRATAGEM_")}
    variables = {"RAY_AUTH_TOKEN": TOKEN, "STRATAGEM_PEER_TIMEOUT_S": "20"}
    return subprocess.run(
        command,
        env={**inherited, **variables, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory) -> str:
    """The last line of a run that loses nothing."""
    whole = _run(tmp_path_factory.mktemp("whole"), "")
    assert whole.returncode == 0, whole.stderr
    return whole.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize(("killed", "name"), [("gcs_server", "GCS"), ("raylet", "raylet")])
def test_lost_ray_is_named_and_a_new_cluster_goes_on(tmp_path, weights, killed, name) -> None:
    lost = _run(tmp_path, killed)
    assert lost.returncode == 1, lost.stderr
    assert f"UnavailableError: Ray's {name} at " in lost.stderr
    assert "has not answered for 10 s: refused" in lost.stderr
    assert "STRATAGEM_PEER_TIMEOUT_S" in lost.stderr
    assert "epoch 39" not in lost.stdout
    resumed = _run(tmp_path, "")
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch 0\n" not in resumed.stdout
    assert resumed.stdout.splitlines()[-1] == weights
