"""Environment variables of launchers."""

from __future__ import annotations

import pytest

from stratagem.cluster.launchers import (
    kubeflow_jax,
    kubeflow_torch,
    open_mpi,
    port_of_job,
    torchrun,
)
from stratagem.cluster.processes import Processes

# What torchrun of PyTorch 2.13 sets for the second of two processes with --master-port 29533.
TORCHRUN = {
    "RANK": "1",
    "GROUP_RANK": "0",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29533",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
KUBEFLOW_JAX = {
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
    "JAX_COORDINATOR_ADDRESS": "job-node-0-0.job:29500",
}
KUBEFLOW_TORCH = {
    "PET_NNODES": "3",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "2",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
_URI = "1531576320.0;tcp://10.96.0.1,10.148.0.1,10.108.0.1:34911"
_URI6 = "1314521088.0;tcp6://[fe80::b9b:ac5d:9cf0:b858,2620:10d:c083:150e::3000:2]:43370"


def test_kubeflow_s_jax_jobs(variables) -> None:
    variables(**KUBEFLOW_JAX)
    assert kubeflow_jax() == Processes(4, 3, "job-node-0-0.job:29500")
    variables(JAX_COORDINATOR_ADDRESS="job-node-0-0.job")
    assert kubeflow_jax() == Processes(4, 3, "job-node-0-0.job:6666")
    variables(JAX_COORDINATOR_PORT="1234")
    assert kubeflow_jax() == Processes(4, 3, "job-node-0-0.job:1234")


def test_port_that_torchrun_s_agent_listens_on_is_left_to_it(variables) -> None:
    variables(**TORCHRUN)
    assert torchrun() == Processes(2, 1, "127.0.0.1:29534", 1, 2)
    variables(MASTER_PORT="65535")
    assert torchrun() == Processes(2, 1, "127.0.0.1:65534", 1, 2)
    variables(TORCHELASTIC_USE_AGENT_STORE="False")
    assert torchrun() == Processes(2, 1, "127.0.0.1:65535", 1, 2)
    variables(JAX_COORDINATOR_PORT="7")
    assert torchrun() == Processes(2, 1, "127.0.0.1:7", 1, 2)


@pytest.mark.parametrize("missing", ["WORLD_SIZE", "RANK", "MASTER_ADDR"])
def test_part_of_torchrun_s_variables_is_no_answer(variables, missing) -> None:
    variables(**{name: text for name, text in TORCHRUN.items() if name != missing})
    assert torchrun() is None


@pytest.mark.parametrize(
    ("given", "address"),
    [
        # JAX's clusters/ompi_cluster.py, get_coordinator_address: recorded.
        ({}, "10.96.0.1:62624"),
        ({"OMPI_MCA_orte_hnp_uri": _URI6}, "[fe80::b9b:ac5d:9cf0:b858]:62880"),
        ({"JAX_COORDINATOR_ADDRESS": "first:99"}, "first:99"),
        ({"JAX_COORDINATOR_ADDRESS": "first"}, "first:62624"),
    ],
)
def test_open_mpi_tells_where_it_was_started_unless_it_is_given(variables, given, address) -> None:
    variables(**{**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": _URI, **given})
    assert open_mpi() == Processes(4, 3, address, 1, 2)


def test_open_mpi_on_one_host_needs_no_address(variables) -> None:
    def found(**given: str) -> str:
        variables(**given)
        processes = open_mpi()
        return str(processes.coordinator_address)

    first = found(**{**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, PMIX_NAMESPACE="prterun-a-1@1")
    host, _, port = first.partition(":")
    assert host == "127.0.0.1"
    assert 61440 <= int(port) <= 65535
    assert found(OMPI_COMM_WORLD_RANK="0") == first
    assert found(PMIX_NAMESPACE="prterun-a-2@1") != first


@pytest.mark.parametrize(
    ("read", "given", "words"),
    [
        *(
            (
                read,
                {name: text for name, text in given.items() if name != missing},
                rf"is set, but {missing} is not(?s:.)*the same launcher",
            )
            for read, given, missing in (
                (kubeflow_jax, KUBEFLOW_JAX, "JAX_PROCESS_ID"),
                (kubeflow_torch, KUBEFLOW_TORCH, "PET_NODE_RANK"),
                (open_mpi, OPEN_MPI, "OMPI_COMM_WORLD_RANK"),
            )
        ),
        (
            kubeflow_torch,
            {**KUBEFLOW_TORCH, "PET_NNODES": "1:4"},
            "PET_NNODES='1:4' is not a single number",
        ),
        (open_mpi, OPEN_MPI, r"have no coordinator_address(?s:.)*JAX_COORDINATO"),
        (
            torchrun,
            {**TORCHRUN, "RANK": "two"},
            "Environment variable RANK: Task index 'two' is invalid",
        ),
    ],
)
def test_variables_that_cannot_be_are_refused(variables, read, given, words) -> None:
    variables(**given)
    with pytest.raises(ValueError, match=words):
        read()


@pytest.mark.parametrize("num_ports", [1, 8, 4096, 5000])
def test_ports_of_a_job_are_ports(num_ports) -> None:
    for job in (0, 1, 4095, 4096, 123456789):
        port = port_of_job(job, num_ports=num_ports)
        assert port >= 61440
        assert port + min(num_ports, 4096) - 1 <= 65535
    assert port_of_job(4096 + 7) == 61447


@pytest.mark.parametrize("num_ports", [1, 2, 8])
def test_ports_of_consecutive_jobs_do_not_overlap(num_ports) -> None:
    # The elements of a Slurm array have such numbers, and may share a node.
    ports = [
        port_of_job(job, num_ports=num_ports) + offset
        for job in range(4711, 4711 + 16)
        for offset in range(num_ports)
    ]
    assert len(set(ports)) == 16 * num_ports
