"""Script sent to a cluster."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from stratagem.launch.remote import remote_cluster as connecting
from stratagem.launch.remote.remote_cluster import connect_to_cluster

PROGRAM = """
import sys
import stratagem as sg
import beside
print("begins")
sg.connect_to_cluster(sys.argv[1], stop_with_client=False)
print("there", beside.NUMBER, sys.argv[2:], end="")
sys.exit(5)
"""


@pytest.mark.parametrize("as_module", [pytest.param(False, marks=pytest.mark.slow), True])
def test_script_runs_there_and_ends_here(fake_head, tmp_path, as_module) -> None:
    folder = tmp_path / "laptop"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    (folder / "beside.py").write_text("NUMBER = 42\n")
    command = ["-m", "train"] if as_module else ["train.py"]
    ended = subprocess.run(
        [sys.executable, *command, fake_head.url, "x y"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (ended.returncode, ended.stderr) == (5, "")
    assert ended.stdout == "begins\nbegins\nthere 42 ['x y']"


def test_program_on_the_cluster_goes_on(monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_REMOTE_JOB", "number")
    connect_to_cluster({"worker": ["nowhere:1"]})


@pytest.mark.parametrize(
    "options",
    [
        {"job_name": "worker"},
        {"task_index": 1},
        {"protocol": "udp"},
        {"cluster_device_filters": object()},
    ],
)
def test_arguments_that_mean_nothing_here_are_refused(options) -> None:
    with pytest.raises(ValueError, match="job_name, task_index, protocol and cluster_device"):
        connect_to_cluster({"worker": ["a:1"]}, **options)


def test_interactive_session_learns_what_to_do(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    with pytest.raises(RuntimeError, match="There is no script to send"):
        connect_to_cluster({"worker": ["a:1"]}, protocol="grpc")


def test_program_that_a_signal_has_ended_leaves_as_a_shell_says(monkeypatch) -> None:
    class Ended:
        def __init__(self, cluster: object, **options: object) -> None:
            pass

        def run_script(self, *arguments: object, **options: object) -> int:
            return -9

    script = types.ModuleType("__main__")
    script.__file__ = "train.py"
    monkeypatch.setitem(sys.modules, "__main__", script)
    monkeypatch.setattr(connecting, "RemoteCluster", Ended)
    with pytest.raises(SystemExit) as raised:
        connect_to_cluster({"worker": ["a:1"]})
    assert raised.value.code == 137
