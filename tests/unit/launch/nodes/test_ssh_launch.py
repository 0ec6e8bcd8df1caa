"""Launch from one terminal, with a program `ssh` that runs the command on this machine."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys

import pytest

import stratagem as sg
from stratagem.cluster.addresses import free_ports
from tests.unit.launch.waiting import is_running, number_in, until

# Notes its arguments; the command is the last one. A host "down" cannot be reached.
SSH = """#!/bin/sh
echo "$@" | head -1 >> ssh-calls
for word in "$@"; do host=$command; command=$word; done
case $host in down) echo "no route to host" >&2; exit 255;; esac
exec sh -c "$command"
"""
WORK = """
import time
from pathlib import Path
print("rank", task["index"], os.environ.get("TOKEN"), "STRATAGEM_SSH_LEASE" in os.environ)
Path(f"secret-{task['index']}").write_text(os.environ["STRATAGEM_SECRET"])
Path(f"pid-{task['index']}").write_text(f"{os.getpid()}\\n")
"""


@pytest.fixture(autouse=True)
def ssh(folder, monkeypatch) -> None:
    program = folder / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{free_ports(1)[0]}"


@pytest.mark.slow
def test_every_host_runs_the_command_in_this_folder(capfd, script, folder, endpoint) -> None:
    path = script(WORK)
    sg.launch.run(
        path, hosts=["a", "b"], rdzv_endpoint=endpoint, ssh_options="-p 2222", env=["TOKEN=x y'z"]
    )
    out = capfd.readouterr().out
    assert "[a] [worker 0] rank 0 x y'z False\n" in out
    assert "[b] [worker 1] rank 1 x y'z False\n" in out
    assert (folder / "pid-1").exists()
    calls = (folder / "ssh-calls").read_text().splitlines()
    assert all(call.startswith("-p 2222 -o BatchMode=yes ") for call in calls)
    (secret,) = {(folder / f"secret-{index}").read_text() for index in range(2)}
    assert len(secret) == 64
    assert not any(secret in call for call in calls)


@pytest.mark.slow
def test_failure_is_raised_with_the_lines_of_node_0(capfd, script, endpoint) -> None:
    path = script(f'{WORK}\nif task["index"]: sys.exit(7)\ntime.sleep(1000)')
    with pytest.raises(RuntimeError, match=r"node 0 \(a\) failed first(?s:.)*exit code 7") as error:
        sg.launch.run(path, hosts="a,b", rdzv_endpoint=endpoint)
    assert "worker 1 on node 1 (" in str(error.value.__cause__)
    err = capfd.readouterr().err
    assert re.search(
        r"\[a\] \[launch\] worker 1 on node 1 \(\S+\) failed first: exit code 7\.", err
    )


@pytest.mark.slow
def test_host_that_cannot_be_reached_ends_all(capfd, script, endpoint) -> None:
    with pytest.raises(RuntimeError, match=r"node 1 \(down\) failed first(?s:.)*exit code 255"):
        sg.launch.run(script(WORK), hosts="a,down", rdzv_endpoint=endpoint)
    err = capfd.readouterr().err
    assert "[down] no route to host\n" in err
    assert "[launch] node 1 (down) did not start (exit code 255): ending all.\n" in err


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_end_of_the_terminal_leaves_nothing(script, folder, endpoint, signum) -> None:
    path = script(f"{WORK}\ntime.sleep(1000)")
    command = [sys.executable, "-m", "stratagem", "launch", "--hosts", "a,b"]
    with subprocess.Popen(
        [*command, "--rdzv-endpoint", endpoint, path],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as terminal:
        pids = [number_in(folder / f"pid-{rank}") for rank in range(2)]
        terminal.send_signal(signum)
        out, _ = terminal.communicate(timeout=60)
    until(lambda: not any(map(is_running, pids)))
    if signum != signal.SIGKILL:
        assert terminal.returncode == 128 + signum
        assert f"[launch] Ended after {signum.name}: worker 0 on node 0 (" in out


@pytest.mark.parametrize(
    "options",
    [{"nnodes": 3}, {"nnodes": "1:3"}, {"nnodes": 1}, {"node_rank": 0}],
)
def test_other_numbers_of_nodes_than_hosts_are_refused(options) -> None:
    with pytest.raises(ValueError, match=r"with 2 hosts(?s:.)*as many nodes as hosts"):
        sg.launch.run("train.py", hosts="a,b", **options)
