"""Slurm's variables, compared with TensorFlow's resolver."""

from __future__ import annotations

import os

import pytest

from stratagem.cluster import accelerators
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver


def _step(rank: int, num_tasks: int, hosts: str, tasks: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(num_tasks),
        "SLURM_STEP_NODELIST": hosts,
        "SLURM_STEP_TASKS_PER_NODE": tasks,
    }


# TF 2.21 SlurmClusterResolver: variables, arguments, then cluster_spec().as_dict(),
# get_task_info(), master(), CUDA_VISIBLE_DEVICES, num_accelerators(), master("worker", 0, "test").
RECORDED = [
    (
        _step(3, 5, "t02n[13,41,43,56,62]", "1(x5)"),
        {"gpus_per_node": 1},
        {"worker": [f"t02n{n}:8888" for n in (13, 41, 43, 56, 62)]},
        (("worker", 3), "grpc://t02n56:8888", "0", {"GPU": 1}, "test://t02n13:8888"),
    ),
    (
        _step(0, 5, "t02n[13,41,43,56,62]", "1(x5)"),
        {
            "jobs": {"ps": 1, "worker": 4},
            "port_base": 8888,
            "gpus_per_node": 1,
            "gpus_per_task": 1,
            "tasks_per_node": 1,
        },
        {"ps": ["t02n13:8888"], "worker": [f"t02n{n}:8888" for n in (41, 43, 56, 62)]},
        (("ps", 0), "grpc://t02n13:8888", "0", {"GPU": 1}, "test://t02n41:8888"),
    ),
    (
        _step(1, 5, "t02n13,t02n41,t02n43", "2(x2),1"),
        {"jobs": {"ps": 1, "worker": 4}, "gpus_per_node": 2, "gpus_per_task": 1},
        {
            "ps": ["t02n13:8888"],
            "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
        },
        (("worker", 0), "grpc://t02n13:8889", "1", {"GPU": 1}, "test://t02n13:8889"),
    ),
    (
        _step(4, 8, "n[1-2]", "4(x2)"),
        {"gpus_per_node": 8},
        {"worker": [f"n{n}:{port}" for n in (1, 2) for port in range(8888, 8892)]},
        (("worker", 4), "grpc://n2:8888", "0,1", {"GPU": 2}, "test://n1:8888"),
    ),
    (
        _step(2, 4, "n[1-2]", "2(x2)"),
        {"gpus_per_node": 4, "gpus_per_task": 1, "auto_set_gpu": False, "rpc_layer": None},
        {"worker": ["n1:8888", "n1:8889", "n2:8888", "n2:8889"]},
        (("worker", 2), "n2:8888", None, {"GPU": 1}, "test://n1:8888"),
    ),
    (
        _step(5, 6, "n[1-2]", "2(x2)"),
        {
            "jobs": {"chief": 1, "worker": 5},
            "gpus_per_node": 3,
            "tasks_per_node": {"n1": 3, "n2": 3},
        },
        {"chief": ["n1:8888"], "worker": ["n1:8889", "n1:8890", "n2:8888", "n2:8889", "n2:8890"]},
        (("worker", 4), "grpc://n2:8890", "2", {"GPU": 1}, "test://n1:8889"),
    ),
]


@pytest.fixture(autouse=True)
def no_gpus(monkeypatch) -> None:
    monkeypatch.setattr(accelerators, "_COMMAND", ("no-such-command-here",))


@pytest.mark.parametrize(("step", "arguments", "cluster", "answers"), RECORDED)
def test_step_is_read_as_in_tensorflow(variables, step, arguments, cluster, answers) -> None:
    variables(**step)
    resolver = SlurmClusterResolver(**arguments)
    assert resolver.cluster_spec().as_dict() == cluster
    assert (
        resolver.get_task_info(),
        resolver.master(),
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        resolver.num_accelerators(),
        resolver.master("worker", 0, "test"),
    ) == answers


def test_task_is_known_before_the_cluster_is_asked_for(variables) -> None:
    variables(**_step(1, 2, "n[1-2]", "1(x2)"))
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == ("worker", 1)
    assert resolver.processes() == Processes(2, 1, "n1:8888")


def test_hosts_stay_in_slurm_s_order(variables) -> None:
    # TensorFlow sorts by name: n10 before n2, and so gives rank 1 the address of another host.
    variables(**_step(1, 10, "n[1-10]", "1(x10)"), SLURMD_NODENAME="n2")
    for arguments in ({}, {"tasks_per_node": {f"n{n}": 1 for n in range(10, 0, -1)}}):
        spec = SlurmClusterResolver(**arguments).cluster_spec()
        assert spec.job_tasks("worker") == [f"n{n}:8888" for n in range(1, 11)]


def test_gpus_of_the_environment_are_dealt_out_by_their_names(variables) -> None:
    variables(**_step(3, 4, "n[1-2]", "2(x2)"), CUDA_VISIBLE_DEVICES="3,5,6,7")
    for _ in range(2):
        # The second resolver starts from all four again.
        resolver = SlurmClusterResolver()
        assert resolver.num_accelerators() == {"GPU": 2}
        resolver.cluster_spec()
        resolver.cluster_spec()
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "6,7"


def test_hosts_with_fewer_gpus_than_tasks_are_left_as_they_are(variables) -> None:
    # TensorFlow raises here, and cannot run on hosts without GPUs.
    variables(**_step(1, 2, "n1", "2"), CUDA_VISIBLE_DEVICES="4")
    resolver = SlurmClusterResolver()
    assert resolver.cluster_spec() == {"worker": ["n1:8888", "n1:8889"]}
    assert resolver.num_accelerators() == {"GPU": 0}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"


_TWO = _step(0, 2, "n1", "2")


@pytest.mark.parametrize(
    ("step", "arguments", "error", "message"),
    [
        (_TWO, {"jobs": {"worker": 3}}, RuntimeError, "Requested 3 tasks"),
        (_step(2, 2, "n1", "2"), {}, RuntimeError, "SLURM_PROCID=2, but 2 were assigned"),
        (
            _TWO,
            {"gpus_per_node": 3, "gpus_per_task": 2},
            RuntimeError,
            "Requested more GPUs per node than available: 2 tasks with 2 GPUs, of 3",
        ),
        # Ranks must go up host by host.
        (
            {**_step(1, 4, "n[1-2]", "2(x2)"), "SLURMD_NODENAME": "n2"},
            {},
            RuntimeError,
            "Task 1 runs on n2, but counting host by host",
        ),
        *(
            (
                {name: text for name, text in _TWO.items() if name != missing},
                {},
                RuntimeError,
                rf"{missing} not found in environment(?s:.)*with srun",
            )
            for missing in _TWO
        ),
        (_step(0, 2, "n[1-2", "2"), {}, ValueError, "Invalid hostlist format"),
        (_step(0, 2, "n1", "2(x"), {}, ValueError, "Invalid tasks-per-node list format"),
        (_step(0, 2, "n[1-2]", "2"), {}, ValueError, "SLURM_STEP_NODELIST names 2 hosts, SLURM"),
        (
            {**_TWO, "SLURM_PROCID": "first"},
            {},
            ValueError,
            "Environment variable SLURM_PROCID: Task index 'first' is invalid",
        ),
        *(
            (
                {**_TWO, "STRATAGEM_SLURM_JOBS": text},
                {},
                ValueError,
                r"STRATAGEM_SLURM_JOBS=.* is malformed(?s:.)*pass jobs",
            )
            for text in ("worker", "worker=", "chief=1;worker=2", "worker=1,worker=1")
        ),
    ],
)
def test_step_that_cannot_be_is_refused(variables, step, arguments, error, message) -> None:
    variables(**step)
    with pytest.raises(error, match=message):
        SlurmClusterResolver(**arguments)


# What Slurm 22.05 sets in a step over both components of a heterogeneous job: two tasks on one
# node, and three on two others.
_HETEROGENEOUS = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "node1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "node[2-3]",
    **_step(2, 5, "node[1-3]", "2(x2),1"),
    "SLURMD_NODENAME": "node2",
}


def test_heterogeneous_step_has_the_roles_of_the_environment(variables) -> None:
    variables(**_HETEROGENEOUS, STRATAGEM_SLURM_JOBS="chief=1,ps=1,worker=3")
    resolver = SlurmClusterResolver()
    assert resolver.get_task_info() == ("worker", 0)
    assert resolver.cluster_spec() == {
        "chief": ["node1:8888"],
        "ps": ["node1:8889"],
        "worker": ["node2:8888", "node2:8889", "node3:8888"],
    }
