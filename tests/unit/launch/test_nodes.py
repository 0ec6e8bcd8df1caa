"""Launches on several nodes: which node this is, what its workers are told, and real launchers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import stratagem as sg
from stratagem.cluster.addresses import free_ports
from stratagem.launch.options import LaunchOptions
from stratagem.launch.plan import Node, find_node, plan_tasks
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.waiting import number_in

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "2",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "JAX_COORDINATOR_ADDRESS": "n0:4",
}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch) -> None:
    kubeflow = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "PET_NNODES", "PET_NODE_RANK")
    ports = ("JAX_COORDINATOR_PORT", "PET_MASTER_PORT")
    for name in (*STEP, *MPI, "JOB_COMPLETION_INDEX", *kubeflow, *ports, "PET_MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def variables(monkeypatch):
    def set_all(given: dict[str, str]) -> None:
        for name, text in given.items():
            monkeypatch.setenv(name, text)

    return set_all


def found(**options) -> Node | None:
    return find_node(LaunchOptions(**options))


def test_one_node_is_this_machine_alone(variables) -> None:
    assert found() is None
    assert found(nnodes=1, node_rank=0, coordinator="a:1") is None
    variables(STEP | MPI)
    assert found(nnodes=1) is None


@pytest.mark.parametrize(
    ("coordinator", "address"),
    [("a:1234", "a:1234"), ("a", "a:29400"), ("[fd00::1]", "[fd00::1]:29400")],
)
def test_node_of_the_options(coordinator, address) -> None:
    assert found(nnodes=2, node_rank=1, coordinator=coordinator) == Node(2, 1, address)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"node_rank": 1}, "without the address of process 0(?s:.)*--coordinator"),
        ({"node_rank": 2, "coordinator": "a"}, "node_rank=2 on one of 2 nodes"),
        ({"coordinator": "a"}, "node_rank=None on one of 2 nodes(?s:.)*--node-rank"),
        ({"node_rank": 1, "coordinator": "a:x"}, "'a:x' is not of the form host:port"),
        ({"node_rank": 1, "coordinator": "a", "ps": 2}, "ps=2 with nnodes=2(?s:.)*or Ray"),
        ({"node_rank": 1, "coordinator": "a", "survivors": True}, "survivors=True with nnodes=2"),
        ({"node_rank": 1, "coordinator": "a", "min_workers": 1}, "min_workers=1 with nnodes=2"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        found(nnodes=2, **options)


def test_slurm_step_and_mpirun_need_no_options(variables) -> None:
    variables(STEP)
    assert found() == Node(3, 2, "n1:61447")
    assert found(coordinator="n1:5") == Node(3, 2, "n1:5")
    variables(MPI)  # in a step of Slurm, as which mpirun may start its daemons
    assert found() == Node(4, 3, "n0:4")
    variables({"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1"})
    variables({"SLURM_STEP_NODELIST": "n1", "SLURM_PROCID": "0"})
    variables({"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"})
    assert found() is None


def test_pods_of_kubeflow_trainer_need_no_options(variables) -> None:
    torch = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "a-0.a"}
    variables(torch | {"PET_MASTER_PORT": "29400", "PET_NPROC_PER_NODE": "1"})
    assert found() is None  # variables that torchrun reads, where nothing started several
    variables({"JOB_COMPLETION_INDEX": "3"})
    assert found() == Node(4, 3, "a-0.a:29400")
    variables({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1", "JAX_COORDINATOR_ADDRESS": "b"})
    assert found() == Node(2, 1, "b:6666")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            STEP | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"},
            r"srun started 3 launchers(?s:.)*--ntasks-per-node=1",
        ),
        (MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, r"mpirun started 4(?s:.)*ppr:1:node"),
    ],
)
def test_several_launchers_on_a_node_are_refused(variables, given, words) -> None:
    variables(given)
    with pytest.raises(ValueError, match=words):
        found()


def test_pods_of_an_indexed_job_meet_at_the_first(variables, monkeypatch) -> None:
    variables({"JOB_COMPLETION_INDEX": "12"})
    name = "train-12.workers.default.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    assert found(nnodes=16) == Node(16, 12, "train-0.workers.default.svc.cluster.local:29400")
    assert found() is None  # an Indexed Job may be many jobs of one node


def test_address_that_a_scheduler_does_not_give_is_asked_for(variables, monkeypatch) -> None:
    variables({"JOB_COMPLETION_INDEX": "1"})
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1")
    words = r"service as `subdomain`(?s:.)*--coordinator(?s:.)*in a Ray job use"
    with pytest.raises(ValueError, match=words):
        found(nnodes=2, node_rank=1)


def test_workers_are_numbered_through_all_nodes() -> None:
    plans = plan_tasks(
        LaunchOptions(workers=3),
        ["true"],
        ports=[1, 2, 3],
        gpus=["0", "1", "2"],
        base={},
        node=Node(4, 2, "a:5"),
    )
    assert [plan.name for plan in plans] == ["worker 6", "worker 7", "worker 8"]
    for index, plan in enumerate(plans):
        assert plan.variables["CUDA_VISIBLE_DEVICES"] == str(index)
        assert plan.variables["TF_CONFIG"] == ""
        assert plan.variables["JAX_NUM_PROCESSES"] == "12"
        assert plan.variables["JAX_PROCESS_ID"] == str(6 + index)
        assert plan.variables["JAX_COORDINATOR_ADDRESS"] == "a:5"


def test_nodes_without_a_secret_are_refused_by_their_launcher(script) -> None:
    with pytest.raises(ValueError, match=r"STRATAGEM_SECRET"):
        sg.launch.run(script(""), nnodes=2, node_rank=0, coordinator="192.0.2.1")


# Real launchers, each of which could be on a machine of its own.

TRAINS = """
import os, signal, sys
from pathlib import Path
import keras
import numpy as np
import stratagem as sg

strategy = sg.MultiWorkerMirroredStrategy()
rank, attempt = int(os.environ["JAX_PROCESS_ID"]), os.environ["STRATAGEM_RESTART_COUNT"]
print(f"rank {rank} of {strategy.num_replicas_in_sync}")
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse")


class Kill(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if f"{rank} {attempt}" in sys.argv and int(self.model.optimizer.iterations) == 5:
            Path(f"pid-{rank}").write_text(f"{os.getpid()}\\n")
            os.kill(os.getpid(), signal.SIGKILL)


rows = np.random.default_rng(0).random((32, 4)).astype("float32")
backup = sg.BackupAndRestore("backup", 2)
model.fit(rows, rows.sum(1), batch_size=8, epochs=3, verbose=0, callbacks=[backup, Kill()])
np.save(f"kernel-{rank}.npy", np.asarray(model.layers[0].kernel))
"""


@pytest.fixture
def nodes(folder):
    """Starts a launcher for each node, on a host of its own if asked for.

    `words` are those that the script gets.
    """

    @contextlib.contextmanager
    def start(
        options: list[str], *words: str, on_hosts: bool = False
    ) -> Iterator[list[subprocess.Popen[str]]]:
        (folder / "train.py").write_text(TRAINS)
        command = [sys.executable, "-m", "stratagem", "launch", "--nnodes", "2", *options]
        with contextlib.ExitStack() as stack:
            places: list[tuple[list[str], str]] = [([], f"127.0.0.1:{free_ports(1)[0]}")] * 2
            if on_hosts:
                places = stack.enter_context(hosts(2))
            command += ["--coordinator", places[0][1]]
            made: list[subprocess.Popen[str]] = []
            for rank, (there, _) in enumerate(places):
                process = subprocess.Popen(
                    [*there, *command, "--node-rank", str(rank), "train.py", *words],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "STRATAGEM_SECRET": "0" * 64},
                )
                stack.callback(process.communicate)
                stack.callback(process.kill)
                made.append(process)
            yield made

    return start


def end_of(launcher: subprocess.Popen[str]) -> tuple[int, str]:
    out, _ = launcher.communicate(timeout=300)
    return launcher.returncode, out


def kernels(folder: Path, count: int) -> np.ndarray:
    return np.array([np.load(folder / f"kernel-{rank}.npy") for rank in range(count)])


@pytest.mark.slow
def test_workers_of_all_nodes_train_together_and_their_run_is_recorded_once(nodes, folder) -> None:
    with nodes(["--workers", "2", "--run-dir", "run"]) as launchers:
        ends = [end_of(one) for one in launchers]
    assert [code for code, _ in ends] == [0, 0], ends
    ranks = [sorted(re.findall(r"\[worker (\d)\] rank \1 of 4", out)) for _, out in ends]
    assert ranks == [["0", "1"], ["2", "3"]]
    assert np.ptp(kernels(folder, 4), axis=0).max() == 0
    ended = [
        json.loads(line)["kind"]
        for path in (folder / "run").rglob("*launcher*")
        for line in path.read_text().splitlines()
    ]
    assert ended.count("end") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "on_hosts"),
    [
        (0, False),
        pytest.param(
            1,
            True,  # network namespaces, in which neither finds the other on loopback
            marks=pytest.mark.skipif(not can_make_hosts(), reason="needs root and iproute2"),
        ),
    ],
)
def test_all_nodes_restart_and_end_with_the_same_weights(nodes, folder, victim, on_hosts) -> None:
    with nodes([]) as launchers:
        assert [end_of(one)[0] for one in launchers] == [0, 0]
    wanted = kernels(folder, 2)
    (folder / "kernel-0.npy").unlink(), (folder / "kernel-1.npy").unlink()
    options = ["--max-restarts", "2"]
    with nodes(options, f"{victim} 0", on_hosts=on_hosts) as launchers:
        ends = [end_of(one) for one in launchers]
    assert [code for code, _ in ends] == [0, 0], ends
    for _, out in ends:
        assert "[launch] Starting all tasks again: restart 1 of 2." in out
        assert "restart 2 of 2" not in out
    assert f"[launch] worker {victim} failed first: killed by SIGKILL." in ends[victim][1]
    np.testing.assert_array_equal(kernels(folder, 2), wanted)


@pytest.mark.slow
def test_loss_without_restarts_ends_both_nodes(nodes, folder) -> None:
    with nodes([], "1 0") as launchers:
        (code, out), (code_there, _) = [end_of(one) for one in launchers]
    number_in(folder / "pid-1")
    assert (code, code_there) == (1, 128 + signal.SIGKILL)
    assert re.search(r"failed first: it died.*, as worker 0 reported \(exit code 1\)", out)
