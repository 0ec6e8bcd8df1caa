"""Environment variables of launchers: torchrun, Kubeflow Trainer, Open MPI."""

from __future__ import annotations

import re
import zlib

from stratagem import environment
from stratagem.cluster.addresses import join_address, with_port
from stratagem.cluster.processes import Processes
from stratagem.cluster.spec import parse_task_index
from stratagem.errors import invalid

# High ports, above the usual ephemeral range.
_FIRST_PORT = 61440
_MAX_PORT = 65535
_KUBEFLOW_JAX_PORT = 6666
_TORCH_PORT = 29500


def number_of(name: str) -> int | None:
    """Returns the whole number in an environment variable; None if it is not set."""
    text = environment.lookup(name)
    try:
        return None if text is None else parse_task_index(text)
    except ValueError as error:
        raise ValueError(f"Environment variable {name}: {error}") from error


def port_of_job(job: int, *, num_ports: int = 1) -> int:
    """Returns a port on which all processes of a job agree, rarely shared by other jobs.

    This is `JAX_COORDINATOR_PORT` if set, or else from 61440 on, with `num_ports` ports in a row.
    The rows of consecutive jobs, such as the elements of an array, do not overlap.

    Source: JAX's clusters/slurm_cluster.py, which derives a single port the same way.
    """
    chosen = number_of("JAX_COORDINATOR_PORT")
    if chosen is not None:
        return chosen
    num_rows = max(1, (_MAX_PORT - _FIRST_PORT + 1) // num_ports)
    return _FIRST_PORT + job % num_rows * num_ports


def kubeflow_jax() -> Processes | None:
    """Reads the variables of a JAX job of Kubeflow Trainer; None without `JAX_NUM_PROCESSES`."""
    num_processes = number_of("JAX_NUM_PROCESSES")
    if num_processes is None:
        return None
    process_id = _required_number("JAX_PROCESS_ID", beside="JAX_NUM_PROCESSES")
    address = environment.lookup("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        address = with_port(address, number_of("JAX_COORDINATOR_PORT") or _KUBEFLOW_JAX_PORT)
    return Processes(num_processes, process_id, address)


def torchrun() -> Processes | None:
    """Reads the variables of `torchrun`; None without `WORLD_SIZE`, `RANK` or `MASTER_ADDR`.

    If its agent listens on `MASTER_PORT`, the next port is used.
    """
    num_processes, process_id = number_of("WORLD_SIZE"), number_of("RANK")
    host = environment.lookup("MASTER_ADDR")
    if num_processes is None or process_id is None or host is None:
        return None
    port = number_of("JAX_COORDINATOR_PORT")
    if port is None:
        port = number_of("MASTER_PORT") or _TORCH_PORT
        if environment.lookup("TORCHELASTIC_USE_AGENT_STORE") == "True":
            port = port + 1 if port < _MAX_PORT else port - 1
    return Processes(
        num_processes,
        process_id,
        join_address(host, port),
        number_of("LOCAL_RANK"),
        number_of("LOCAL_WORLD_SIZE"),
    )


def kubeflow_torch() -> Processes | None:
    """Reads the variables of a torch job of Kubeflow Trainer, with one process per pod.

    Returns None without `PET_NNODES`. Raises ValueError for a range of nodes, as in elastic jobs.
    """
    num_nodes = environment.lookup("PET_NNODES")
    if num_nodes is None:
        return None
    if not num_nodes.isdecimal():
        raise invalid(
            f"PET_NNODES={num_nodes!r} is not a single number.",
            expected="a fixed number of nodes; the number of processes cannot change.",
            fix="set minNodes and maxNodes of the job to the same number.",
        )
    process_id = _required_number("PET_NODE_RANK", beside="PET_NNODES")
    host = environment.lookup("PET_MASTER_ADDR")
    port = number_of("JAX_COORDINATOR_PORT") or number_of("PET_MASTER_PORT") or _TORCH_PORT
    address = None if host is None else join_address(host, port)
    return Processes(int(num_nodes), process_id, address, 0, 1)


def open_mpi() -> Processes | None:
    """Reads the variables of Open MPI's `mpirun`; None without `OMPI_COMM_WORLD_SIZE`.

    The coordinator is `JAX_COORDINATOR_ADDRESS`, or this host if all processes run on it, or
    `mpirun`'s host, which Open MPI 4 names and on which process 0 must run.
    """
    num_processes = number_of("OMPI_COMM_WORLD_SIZE")
    if num_processes is None:
        return None
    num_local = number_of("OMPI_COMM_WORLD_LOCAL_SIZE")
    return Processes(
        num_processes,
        _required_number("OMPI_COMM_WORLD_RANK", beside="OMPI_COMM_WORLD_SIZE"),
        _open_mpi_coordinator(all_local=num_local == num_processes),
        number_of("OMPI_COMM_WORLD_LOCAL_RANK"),
        num_local,
    )


def _open_mpi_coordinator(*, all_local: bool) -> str | None:
    # "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911": the job's number, and mpirun's addresses.
    uri = environment.lookup("OMPI_MCA_orte_hnp_uri") or ""
    job = re.match(r"(\d+)\.", uri)
    host = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    # Open MPI 4 numbers its jobs in steps of 4096; later versions only name them.
    name = environment.lookup("PMIX_NAMESPACE") or ""
    number = int(job[1]) // 4096 if job else zlib.crc32(name.encode())
    chosen = environment.lookup("JAX_COORDINATOR_ADDRESS")
    if chosen is not None:
        return with_port(chosen, port_of_job(number))
    if all_local:
        return join_address("127.0.0.1", port_of_job(number))
    return join_address(host[1] or host[2], port_of_job(number)) if host else None


def _required_number(name: str, *, beside: str) -> int:
    number = number_of(name)
    if number is None:
        raise invalid(
            f"{beside} is set, but {name} is not.",
            expected="both variables, from the same launcher.",
            fix=f"set {name} to this process's rank, or unset {beside}.",
        )
    return number
