"""Nodes of a job: how many machines run this launch, which one this is, where process 0 listens.

Each node starts its own workers, numbered through all nodes, and tells them the number of processes
and the address of process 0. There the workers of all nodes meet as those of any cluster
(`group/hub.py`): launchers do not speak with each other. If a worker fails, those of other nodes
lose a peer and fail as well, so each launcher restarts its own. A restarted worker that finds the
former group still there waits until that has ended.
"""

from __future__ import annotations

import dataclasses
import socket

from stratagem import environment
from stratagem.cluster.addresses import join_address, split_address
from stratagem.cluster.launchers import open_mpi, port_of_job
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver
from stratagem.cluster.spec import parse_task_index
from stratagem.errors import explain
from stratagem.launch.plan.options import LaunchOptions

# As for torchrun.
DEFAULT_PORT = 29400


@dataclasses.dataclass(frozen=True)
class Node:
    """One of `count` nodes; `coordinator` is `host:port` of process 0, which runs on node 0."""

    count: int
    rank: int
    coordinator: str


def find_node(options: LaunchOptions) -> Node | None:
    """Returns which node this is: from the options, a Slurm step, Open MPI or an Indexed Job.

    None for this machine alone. Raises ValueError if the rank or the address of process 0 is
    missing or invalid, or for tasks that need other addresses; RuntimeError for invalid variables
    of Slurm.
    """
    if options.nnodes == 1:
        return None
    started = _slurm_step() or _open_mpi_step()
    count = options.nnodes or (1 if started is None else started.count)
    if count == 1:
        return None
    rank = options.node_rank
    if rank is None and started is not None:
        rank = started.rank
    if rank is None and (index := environment.lookup("JOB_COMPLETION_INDEX")) is not None:
        rank = parse_task_index(index)
    if rank is None or rank >= count:
        raise ValueError(
            explain(
                f"node_rank={rank} on one of {count} nodes.",
                expected=f"0 to {count - 1}.",
                fix="give each node its own --node-rank, and all the same --nnodes.",
            )
        )
    if options.coordinator is not None:
        coordinator = _with_port(options.coordinator)
    elif started is not None:
        coordinator = started.coordinator
    else:
        coordinator = join_address(_host_of_pod(count), DEFAULT_PORT)
    _check_tasks(options, count)
    return Node(count, rank, coordinator)


def _check_tasks(options: LaunchOptions, count: int) -> None:
    """Raises ValueError for tasks and restarts that need the addresses of all, or one launcher."""
    of_tasks = ("chief", "ps", "evaluator", "input_workers")
    for name in (*of_tasks, "survivors", "min_workers", "max_workers"):
        if value := getattr(options, name):
            raise ValueError(
                explain(
                    f"{name}={value!r} with nnodes={count}.",
                    expected="the same number of workers on each node, which restart together.",
                    fix="leave it out: process 0 is the chief. Other tasks, and an "
                    "ElasticStrategy, need the address of each: set TF_CONFIG, or use "
                    "`stratagem slurm render`, `stratagem kubernetes render` or Ray.",
                )
            )


def _with_port(address: str) -> str:
    """Returns `host:port` of an address whose port may be omitted."""
    # An IPv6 host is in brackets, and has colons of its own.
    has_port = ":" in address.rpartition("]")[2]
    return join_address(*split_address(address if has_port else f"{address}:{DEFAULT_PORT}"))


def _slurm_step() -> Node | None:
    """Returns the node of a Slurm step with one task on each; None outside a step of several."""
    count = environment.lookup("SLURM_STEP_NUM_TASKS")
    if count in (None, "1") or environment.lookup("SLURM_PROCID") is None:
        return None
    job = parse_task_index(environment.lookup("SLURM_JOB_ID") or "0")
    resolver = SlurmClusterResolver(port_base=port_of_job(job), gpus_per_node=0)
    tasks = [address for address in resolver.cluster_spec().job_tasks("worker") if address]
    hosts = {split_address(address)[0] for address in tasks}
    if len(hosts) < len(tasks):
        raise _several_on_one_node(len(tasks), "srun --ntasks-per-node=1", "srun")
    return Node(len(tasks), resolver.task_id or 0, tasks[0])


def _open_mpi_step() -> Node | None:
    """Returns the node of an `mpirun` with one process on each; None without one of several."""
    processes = open_mpi()
    if processes is None or processes.num_processes == 1:
        return None
    if processes.num_local_processes != 1:
        raise _several_on_one_node(processes.num_processes, "mpirun --map-by ppr:1:node", "mpirun")
    return Node(processes.num_processes, processes.process_id, processes.coordinator_address or "")


def _several_on_one_node(count: int, command: str, starter: str) -> ValueError:
    return ValueError(
        explain(
            f"{starter} started {count} launchers, several on one node.",
            expected="one launcher per node, which starts the workers of its node.",
            fix=f"use {command} stratagem launch --workers N; or start each worker by "
            f"{starter} python train.py, without the launcher.",
        )
    )


def _host_of_pod(count: int) -> str:
    """Returns pod 0 of an Indexed Job, whose headless service gives pods names of their own."""
    index, own = environment.lookup("JOB_COMPLETION_INDEX"), socket.getfqdn()
    name, _, domain = own.partition(".")
    if index is not None and name.endswith(f"-{index}") and domain:
        return f"{name.removesuffix(index)}0.{domain}"
    fix = "pass --coordinator HOST:PORT, an address of node 0."
    if index is not None:
        fix = f"set `subdomain` of the pods to a headless service ({own} is no such name), or {fix}"
    elif environment.lookup("RAY_JOB_CONFIG_JSON_ENV_VAR") is not None:
        fix = (
            "in a Ray job use sg.ParameterServerStrategy, which places its processes itself; or "
            + fix
        )
    raise ValueError(
        explain(
            f"nnodes={count} without the address of process 0.",
            expected="coordinator, a Slurm step, mpirun, or an Indexed Job of Kubernetes.",
            fix=fix,
        )
    )
