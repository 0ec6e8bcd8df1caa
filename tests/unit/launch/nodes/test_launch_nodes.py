"""Launchers of several nodes on one machine: real processes, from first line to end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

import stratagem as sg
from stratagem.cluster.addresses import free_ports
from tests.unit.launch.waiting import is_running, number_in, until

LAUNCH = (sys.executable, "-m", "stratagem", "launch")
# Writes its number into a file, and waits until the test creates another one.
WORK = """
import time
from pathlib import Path
attempt = os.environ["STRATAGEM_RESTART_COUNT"]
size = len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"])
rank = task["index"]
print(f"rank {rank} of {size}")
Path(f"pid-{attempt}-{rank}").write_text(f"{os.getpid()}\\n")
while not Path(f"go-{attempt}").exists():
    time.sleep(0.01)
"""


@pytest.fixture
def nodes(script, folder):
    """Starts the launcher of each node; the ranks of all but the first are as they come."""

    @contextlib.contextmanager
    def start(text: str, *options: str, count: int = 2, nnodes: str = "2") -> Iterator[list]:
        endpoint = f"127.0.0.1:{free_ports(1)[0]}"
        command = [*LAUNCH, "--nnodes", nnodes, "--rdzv-endpoint", endpoint, *options]
        path = script(text)
        with contextlib.ExitStack() as stack:

            def launcher(*more: str) -> subprocess.Popen[str]:
                process = subprocess.Popen(
                    [*command, *more, path],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    cwd=folder,
                )
                stack.callback(process.communicate)
                stack.callback(process.kill)
                return process

            made = [launcher("--node-rank", "0")]
            made += [launcher("--node-rank", str(rank)) for rank in range(1, count)]
            yield [*made, launcher]

    return start


def end_of(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = launcher.communicate(timeout=60)
    return launcher.returncode, out


@pytest.mark.slow
def test_workers_of_all_nodes_form_one_cluster(nodes, folder) -> None:
    with nodes(WORK, "--workers", "2") as (leader, other, _):
        for rank in range(4):
            number_in(folder / f"pid-0-{rank}")
        (folder / "go-0").touch()
        ends = [end_of(leader), end_of(other)]
    assert [code for code, _ in ends] == [0, 0]
    ranks = [sorted(re.findall(r"\[worker (\d)\] rank \1 of 4", out)) for _, out in ends]
    assert ranks == [["0", "1"], ["2", "3"]]
    assert "[launch] Node 0 ended the job: all workers are done." in ends[1][1]


@pytest.mark.slow
def test_first_cause_of_all_nodes_is_on_node_0_and_ends_all(nodes, folder) -> None:
    text = f'{WORK}\nif rank == 1: raise ValueError("loss is nan")\ntime.sleep(1000)'
    with nodes(text) as (leader, other, _):
        pids = [number_in(folder / f"pid-0-{rank}") for rank in range(2)]
        (folder / "go-0").touch()
        (code, out), (code_there, out_there) = end_of(leader), end_of(other)
    assert (code, code_there) == (1, 1)
    assert not any(map(is_running, pids))
    assert re.search(
        r"\[launch\] worker 1 on node 1 \(\S+\) failed first: exit code 1\.\n"
        r"\[launch\] Its last lines:\n(\[launch\]     .*\n)+"
        r"\[launch\]     ValueError: loss is nan\n"
        r"\[launch\] Stopped: worker 0 on node 0 \(\S+\) \(killed by SIGTERM\)\.\n",
        out,
    )
    assert out_there.count("failed first") == 1
    assert "[launch] Node 0 ended the job: worker 1 on node 1 (" in out_there


@pytest.mark.slow
def test_lost_node_is_left_out_and_returns(nodes, folder) -> None:
    options = ("--max-restarts", "3", "--rejoin-after-s", "0")
    with nodes(WORK, *options, nnodes="1:2") as (leader, other, launcher):
        there = number_in(folder / "pid-0-1")
        other.kill()
        number_in(folder / "pid-1-0")
        until(lambda: not is_running(there))
        assert not (folder / "pid-1-1").exists()
        again = launcher("--node-rank", "1")
        number_in(folder / "pid-2-1")
        (folder / "go-2").touch()
        (code, out), (code_there, _) = end_of(leader), end_of(again)
    assert (code, code_there) == (0, 0)
    assert "failed first: its node closed the connection; its launcher ended or was killed." in out
    assert "[launch] Starting all tasks again: restart 1 of 3." in out
    assert re.search(r"\[launch\] 1 workers on 1 nodes: node 0 \(\S+\)\.", out)
    assert "[launch] Starting all tasks again; this does not count as a failure." in out


@pytest.mark.slow
def test_signal_to_one_node_is_named_as_the_cause(nodes, folder) -> None:
    with nodes(WORK) as (leader, other, _):
        pids = [number_in(folder / f"pid-0-{rank}") for rank in range(2)]
        other.send_signal(signal.SIGTERM)
        (code, out), (code_there, _) = end_of(leader), end_of(other)
    assert (code, code_there) == (128 + signal.SIGTERM,) * 2
    assert not any(map(is_running, pids))
    words = "failed first: killed by SIGTERM, after SIGTERM to the launcher of its node."
    assert words in out


@pytest.mark.slow
def test_interrupt_of_all_nodes_at_once_reaches_each_task_once(nodes, folder) -> None:
    """As by `srun`, which passes it on to all nodes, and node 0 does so too."""
    text = """
import time
from pathlib import Path
rank = task["index"]
try:
    Path(f"pid-0-{rank}").write_text(f"{os.getpid()}\\n")
    time.sleep(1000)
except KeyboardInterrupt:
    time.sleep(0.5)  # a second one would end this
    Path(f"saved-{rank}").touch()
"""
    with nodes(text) as (leader, other, _):
        for rank in range(2):
            number_in(folder / f"pid-0-{rank}")
        leader.send_signal(signal.SIGINT)
        other.send_signal(signal.SIGINT)
        (code, out), (code_there, out_there) = end_of(leader), end_of(other)
    assert (code, code_there) == (0, 0), out + out_there
    assert sorted(path.name for path in folder.glob("saved-*")) == ["saved-0", "saved-1"]


@pytest.mark.slow
def test_end_of_node_0_ends_the_others(nodes, folder) -> None:
    with nodes(WORK) as (leader, other, _):
        pids = [number_in(folder / f"pid-0-{rank}") for rank in range(2)]
        leader.kill()
        code, out = end_of(other)
    assert code == 1
    until(lambda: not any(map(is_running, pids)))
    assert "is lost: node 0 closed the connection; its launcher ended or was killed." in out
    assert "see the report on node 0" in out


@pytest.mark.slow
def test_absent_nodes_are_named_on_both_sides(nodes, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_JOIN_TIMEOUT_S", "1")
    with nodes(WORK, count=2, nnodes="3") as (leader, other, _):
        (code, out), (code_there, out_there) = end_of(leader), end_of(other)
    assert (code, code_there) == (1, 1)
    for text in (out, out_there):
        assert "missing for 1 s: node 2." in text
        assert "at least 3 nodes within STRATAGEM_JOIN_TIMEOUT_S" in text


def test_range_of_workers_is_refused_with_nodes() -> None:
    more = {"nnodes": 2, "node_rank": 0, "rdzv_endpoint": "127.0.0.1:1"}
    with pytest.raises(ValueError, match=r"with a range of workers(?s:.)*MIN:MAX"):
        sg.launch.run("true", min_workers=1, **more)
    with pytest.raises(ValueError, match="with a range of workers"):
        sg.launch.run("true", elastic=sg.ElasticConfig(1, 2), **more)


def test_spawn_is_for_one_machine() -> None:
    for more in ({"nnodes": 2}, {"hosts": ["a"]}, {"hostfile": os.devnull}):
        with pytest.raises(ValueError, match=r"spawn with nnodes=(?s:.)*sg\.launch\.run"):
            sg.launch.spawn(pow, (2, 3), **more)


def test_launchers_of_several_hosts_need_a_secret(script) -> None:
    with pytest.raises(ValueError, match=r"This launcher has no secret(?s:.)*host0"):
        sg.launch.run(script(""), nnodes=2, node_rank=1, rdzv_endpoint="host0:29400")
