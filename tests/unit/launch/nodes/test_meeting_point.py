"""How nodes meet: from options, and environments of Slurm and Kubernetes."""

from __future__ import annotations

import socket

import pytest

from stratagem.launch.nodes.rendezvous import MeetingPoint, find_meeting_point
from stratagem.launch.plan.options import LaunchOptions

STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
    "SLURM_PROCID": "2",
}


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch) -> None:
    for name in (*STEP, "JOB_COMPLETION_INDEX", "JAX_COORDINATOR_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def variables(monkeypatch):
    def set_all(given: dict[str, str]) -> None:
        for name, text in given.items():
            monkeypatch.setenv(name, text)

    return set_all


def found(**options) -> MeetingPoint | None:
    return find_meeting_point(LaunchOptions(**options))


def point(least: int, most: int, rank: int | None, host: str, port: int) -> MeetingPoint:
    return MeetingPoint(least=least, most=most, rank=rank, host=host, port=port)


def test_one_node_meets_no_other() -> None:
    assert found() is None
    assert found(nnodes=1, node_rank=0, rdzv_endpoint="a:1") is None


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [("a:1234", "a", 1234), ("a", "a", 29400), ("[fd00::1]:5", "fd00::1", 5)],
)
def test_options_are_those_of_torchrun(endpoint, host, port) -> None:
    assert found(nnodes="2:4", rdzv_endpoint=endpoint) == point(2, 4, None, host, port)
    assert found(nnodes=2, node_rank=1, rdzv_endpoint=endpoint) == point(2, 2, 1, host, port)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"nnodes": 2}, "without the address of node 0(?s:.)*--rdzv-endpoint(?s:.)*--hosts"),
        ({"nnodes": 2, "node_rank": 2, "rdzv_endpoint": "a"}, "node_rank=2 is too large for 2"),
        ({"nnodes": 2, "rdzv_endpoint": "a:x"}, "'a:x' is not of the form host:port"),
    ],
)
def test_options_that_cannot_be_are_refused(options, words) -> None:
    with pytest.raises(ValueError, match=words):
        found(**options)


def test_slurm_step_needs_no_options(variables) -> None:
    variables(STEP)
    assert found() == point(3, 3, 2, "n1", 61447)
    assert found(rdzv_endpoint="n1:5") == point(3, 3, 2, "n1", 5)
    assert found(nnodes="2:3") == point(2, 3, 2, "n1", 61447)
    assert found(nnodes=1) is None


def test_slurm_step_of_one_task_or_none_is_this_machine_alone(variables) -> None:
    variables(STEP | {"SLURM_STEP_NUM_TASKS": "1"})
    assert found() is None


def test_several_launchers_on_a_node_of_slurm_are_refused(variables) -> None:
    variables(STEP | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "3"})
    with pytest.raises(ValueError, match=r"srun started 3 launchers(?s:.)*--ntasks-per-node=1"):
        found()


def test_pods_of_an_indexed_job_meet_at_the_first(variables, monkeypatch) -> None:
    variables({"JOB_COMPLETION_INDEX": "12"})
    name = "train-12.workers.default.svc.cluster.local"
    monkeypatch.setattr(socket, "getfqdn", lambda: name)
    host = "train-0.workers.default.svc.cluster.local"
    assert found(nnodes=16) == point(16, 16, 12, host, 29400)
    assert found() is None  # an Indexed Job may be many jobs of one node


def test_pods_without_a_headless_service_are_refused(variables, monkeypatch) -> None:
    variables({"JOB_COMPLETION_INDEX": "1"})
    monkeypatch.setattr(socket, "getfqdn", lambda: "train-1")
    with pytest.raises(ValueError, match=r"set `subdomain`(?s:.)*train-1 is no such name"):
        found(nnodes=2)


def test_ray_job_is_sent_elsewhere(variables) -> None:
    variables({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"})
    with pytest.raises(ValueError, match=r"in a Ray job use sg.ParameterServerStrategy"):
        found(nnodes=2)


def test_host_of_the_rendezvous_is_node_0_or_has_its_address() -> None:
    assert point(2, 2, 0, "elsewhere.invalid", 1).is_here
    assert not point(2, 2, 1, "127.0.0.1", 1).is_here
    assert point(2, 2, None, "127.0.0.1", 1).is_here
    assert not point(2, 2, None, "elsewhere.invalid", 1).is_here
    assert not point(2, 2, None, "192.0.2.1", 1).is_here  # reserved for documentation
