"""Four hosts with real `sshd`: training, a killed worker, hosts unplugged or killed, and back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.nodes.ssh_hosts import (
    NAMES,
    SshHosts,
    reason_to_skip,
    ssh_hosts,
    wait_for_end_of,
)
from tests.unit.launch.waiting import number_in

_REASON = reason_to_skip()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(_REASON is not None, reason=f"{_REASON}")]

ALL = ",".join(NAMES)
INPUT_PROGRAM = Path(__file__).parents[1] / "input_program.py"
TRAIN = """
import keras
import numpy as np
import stratagem as sg

strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
rows = np.arange(64.0, dtype="float32").reshape(16, 4) / 64
history = model.fit(rows, rows.sum(axis=1), batch_size=8, verbose=0)
rank = strategy.cluster_resolver.task_id
print(f"rank {rank} of {strategy.num_replicas_in_sync}: {history.history['loss'][0]:.6f}")
"""
WORK = """
import json, os, time
from pathlib import Path
config = json.loads(os.environ["TF_CONFIG"])
rank, attempt = config["task"]["index"], os.environ["STRATAGEM_RESTART_COUNT"]
print("rank", rank, "of", len(config["cluster"]["worker"]))
Path(f"pid-{attempt}-{rank}").write_text(f"{os.getpid()}\\n")
while not Path(f"go-{attempt}").exists():
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory) -> Iterator[SshHosts]:
    with ssh_hosts(tmp_path_factory.mktemp("keys"), "10.91.0") as made:
        yield made


@pytest.fixture
def launch(four_hosts, tmp_path):
    """Starts the script on all hosts; afterwards none of its processes is left anywhere."""
    mark = f"mark-of-{tmp_path.name}-{os.getpid()}"

    def start(text: str, *options: str) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(text)
        words = ("--hosts", ALL, "--env", f"MARK={mark}", *options, "train.py")
        return four_hosts.launch(*words, folder=tmp_path)

    yield start
    assert wait_for_end_of(mark) == set()


def pids_of(folder: Path, attempt: int, count: int) -> list[int]:
    return [number_in(folder / f"pid-{attempt}-{rank}") for rank in range(count)]


def end_of(terminal: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = terminal.communicate(timeout=240)
    return terminal.returncode, out


def test_one_command_trains_on_four_hosts(launch) -> None:
    code, out = end_of(launch(TRAIN))
    assert code == 0, out
    lines = re.findall(r"\[(\w)\] \[worker (\d)\] rank (\d) of 4: (\S+)", out)
    assert [line[:3] for line in sorted(lines)] == [
        (name, str(rank), str(rank)) for rank, name in enumerate(NAMES)
    ]
    assert len({loss for *_, loss in lines}) == 1  # of the global batch, on every host


def test_input_workers_of_all_hosts_read_one_job(launch) -> None:
    code, out = end_of(launch(INPUT_PROGRAM.read_text(), "--input-workers", "1"))
    assert code == 0, out
    assert "[a] [input 0] Input service at tcp://" in out
    assert len(re.findall(r"\[([bcd])\] \[input \d\] 1 input workers joined ", out)) == 3
    epochs = re.findall(r"\[worker (\d)\] epoch (\d): (\d+) steps, sum 319600", out)
    # Steps have the rows of all processes, and each row comes once.
    assert sorted(one[:2] for one in epochs) == [(str(r), str(e)) for r in range(4) for e in "01"]
    assert len({one[1:] for one in epochs}) == 2


def test_killed_worker_is_the_first_cause_of_all(launch, tmp_path) -> None:
    terminal = launch(WORK)
    os.kill(pids_of(tmp_path, 0, 4)[2], signal.SIGKILL)
    code, out = end_of(terminal)
    assert code == 128 + signal.SIGKILL
    assert "[a] [launch] worker 2 on node 2 (c) failed first: killed by SIGKILL.\n" in out
    places = [f"worker {i} on node {i} ({NAMES[i]})" for i in (0, 1, 3)]
    stopped = ", ".join(f"{place} (killed by SIGTERM)" for place in places)
    assert f"[a] [launch] Stopped: {stopped}.\n" in out


def test_unplugged_host_is_named_with_the_limit(launch, four_hosts, tmp_path) -> None:
    terminal = launch(WORK, "--node-timeout-s", "3")
    pids_of(tmp_path, 0, 4)
    four_hosts.plug("b", "down")
    try:
        code, out = end_of(terminal)
    finally:
        four_hosts.plug("b", "up")
    assert code == 128 + signal.SIGKILL
    reason = "no answer from its node for 3 s, the limit of --node-timeout-s"
    assert f"[a] [launch] node 1 (b) is lost: {reason}.\n" in out
    assert f"[a] [launch] worker 1 on node 1 (b) failed first: {reason}.\n" in out


@pytest.mark.parametrize("is_killed", [False, True], ids=["unplugged", "killed"])
def test_job_continues_without_a_host_and_takes_it_back(
    is_killed, launch, four_hosts, tmp_path
) -> None:
    options = ("--nnodes", "2:4", "--max-restarts", "3", "--rejoin-after-s", "0")
    terminal = launch(WORK, *options, "--node-timeout-s", "2")
    pids_of(tmp_path, 0, 4)
    if is_killed:
        four_hosts.kill("b")
    else:
        four_hosts.plug("b", "down")
    pids_of(tmp_path, 1, 3)
    if is_killed:
        four_hosts.boot("b")
    else:
        four_hosts.plug("b", "up")
    pids_of(tmp_path, 2, 4)
    (tmp_path / "go-2").touch()
    code, out = end_of(terminal)
    assert code == 0, out
    starts = re.findall(r"\[launch\] (\d) workers on \d nodes: (.*)\.", out)
    all_four = ", ".join(f"node {rank} ({name})" for rank, name in enumerate(NAMES))
    assert starts == [
        ("4", all_four),
        ("3", "node 0 (a), node 2 (c), node 3 (d)"),
        ("4", all_four),
    ]
    is_told = "[b] [launch] Ending the tasks of this node, then joining again.\n" in out
    assert is_told is not is_killed


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGKILL])
def test_end_of_the_terminal_ends_all_hosts(launch, tmp_path, signum) -> None:
    terminal = launch(WORK)
    pids_of(tmp_path, 0, 4)
    terminal.send_signal(signum)
    code, out = end_of(terminal)
    if signum == signal.SIGINT:
        assert code == 128 + signum
        assert "[a] [launch] Ended after SIGINT: worker 0 on node 0 (a) (killed by SIGINT)" in out
