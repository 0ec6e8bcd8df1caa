"""What launchers put into the environment of the processes that they start."""

from __future__ import annotations

import re
import zlib

from stratagem import environment
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.processes import Processes
from stratagem.cluster.spec import parse_task_index
from stratagem.messages import explain

__all__ = ["kubeflow_jax", "kubeflow_torch", "open_mpi", "port_of_job", "torchrun"]

# The upper end of the ports, which systems do not hand out by themselves.
_FIRST_PORT = 61440
_MAX_PORT = 65535
_KUBEFLOW_JAX_PORT = 6666
_TORCH_PORT = 29500


def port_of_job(job: int, *, num_ports: int = 1) -> int:
    """Returns a port that all processes of a job agree on, and other jobs hardly have.

    Args:
        job: the job's number.
        num_ports: how many ports in a row there have to be.

    Returns:
        `JAX_COORDINATOR_PORT` where it is set; else a port from 61440 on.

    Raises:
        ValueError: the variable is no number.

    Source: JAX's clusters/slurm_cluster.py, which derives it the same way.
    """
    chosen = _number("JAX_COORDINATOR_PORT")
    return (
        _FIRST_PORT + job % max(1, _MAX_PORT - _FIRST_PORT - num_ports + 2)
        if chosen is None
        else chosen
    )


def kubeflow_jax() -> Processes | None:
    """Reads what Kubeflow Trainer tells the processes of a JAX job.

    Returns:
        The processes; None where `JAX_NUM_PROCESSES` is not set.

    Raises:
        ValueError: another variable is missing, or none of its kind.
    """
    num_processes = _number("JAX_NUM_PROCESSES")
    if num_processes is None:
        return None
    process_id = _required_number("JAX_PROCESS_ID", beside="JAX_NUM_PROCESSES")
    address = environment.lookup("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        address = _with_port(address, _number("JAX_COORDINATOR_PORT") or _KUBEFLOW_JAX_PORT)
    return Processes(num_processes, process_id, address)


def torchrun() -> Processes | None:
    """Reads what `torchrun` tells the processes that it starts.

    Its agent listens on `MASTER_PORT` itself, and says so; the next port is taken then.

    Returns:
        The processes; None where `WORLD_SIZE`, `RANK` or `MASTER_ADDR` is not set.

    Raises:
        ValueError: a variable that is no number.
    """
    num_processes, process_id = _number("WORLD_SIZE"), _number("RANK")
    host = environment.lookup("MASTER_ADDR")
    if num_processes is None or process_id is None or host is None:
        return None
    port = _number("JAX_COORDINATOR_PORT")
    if port is None:
        port = _number("MASTER_PORT") or _TORCH_PORT
        if environment.lookup("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = port + 1 if port < _MAX_PORT else port - 1
    return Processes(
        num_processes,
        process_id,
        join_address(host, port),
        _number("LOCAL_RANK"),
        _number("LOCAL_WORLD_SIZE"),
    )


def kubeflow_torch() -> Processes | None:
    """Reads what Kubeflow Trainer tells a pod that would start `torchrun`: one process a pod.

    Returns:
        The processes; None where `PET_NNODES` is not set.

    Raises:
        ValueError: another variable is missing or no number; a range of nodes, as of elastic jobs.
    """
    num_nodes = environment.lookup("PET_NNODES")
    if num_nodes is None:
        return None
    if not num_nodes.isdecimal():
        raise ValueError(
            explain(
                f"PET_NNODES={num_nodes!r} is not one number.",
                expected="a fixed number of nodes: the number of processes cannot change.",
                fix="set minNodes and maxNodes of the job to the same number.",
            )
        )
    process_id = _required_number("PET_NODE_RANK", beside="PET_NNODES")
    host = environment.lookup("PET_MASTER_ADDR")
    port = _number("JAX_COORDINATOR_PORT") or _number("PET_MASTER_PORT") or _TORCH_PORT
    address = None if host is None else join_address(host, port)
    return Processes(int(num_nodes), process_id, address, 0, 1)


def open_mpi() -> Processes | None:
    """Reads what Open MPI's `mpirun` tells the processes that it starts.

    The coordinator is `JAX_COORDINATOR_ADDRESS`; without it this host if all processes are on it,
    or the host where `mpirun` runs, which Open MPI 4 tells: process 0 must be there.

    Returns:
        The processes; None where `OMPI_COMM_WORLD_SIZE` is not set.

    Raises:
        ValueError: a variable that is no number, or nothing that names the coordinator.
    """
    num_processes = _number("OMPI_COMM_WORLD_SIZE")
    if num_processes is None:
        return None
    num_local = _number("OMPI_COMM_WORLD_LOCAL_SIZE")
    return Processes(
        num_processes,
        _required_number("OMPI_COMM_WORLD_RANK", beside="OMPI_COMM_WORLD_SIZE"),
        _open_mpi_coordinator(all_local=num_local == num_processes),
        _number("OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local,
    )


def _open_mpi_coordinator(*, all_local: bool) -> str | None:
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911": the job's number, and mpirun's addresses.
    uri = environment.lookup("OMPI_MCA_orte_hnp_uri") or ""
    job = re.match(r"(\d+)\.", uri)
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    # Open MPI 4 numbers its jobs in steps of 4096; later ones only name them.
    name = environment.lookup("PMIX_NAMESPACE") or ""
    number = int(job[1]) // 4096 if job else zlib.crc32(name.encode())
    chosen = environment.lookup("JAX_COORDINATOR_ADDRESS")
    if chosen is not None:
        return _with_port(chosen, port_of_job(number))
    if all_local:
        return join_address("127.0.0.1", port_of_job(number))
    return join_address(host[1] or host[2], port_of_job(number)) if host else None


def _with_port(address: str, port: int) -> str:
    try:
        split_address(address)
    except ValueError:
        return join_address(address, port)
    return address


def _number(name: str) -> int | None:
    text = environment.lookup(name)
    try:
        return None if text is None else parse_task_index(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {name}: {error}") from error


def _required_number(name: str, *, beside: str) -> int:
    number = _number(name)
    if number is None:
        raise ValueError(
            explain(
                f"{beside} is set and {name} is not.",
                expected="both: they come from the same launcher.",
                fix=f"set {name} to this process's rank, or unset {beside}.",
            )
        )
    return number
