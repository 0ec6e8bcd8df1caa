"""Detection of the cluster from environment variables of launchers and schedulers."""

from __future__ import annotations

import functools
import importlib
import secrets
import sys
from collections.abc import Callable
from typing import Any

from stratagem import environment
from stratagem.cluster.addresses import free_ports, join_address, own_name
from stratagem.cluster.launchers import (
    kubeflow_jax,
    kubeflow_torch,
    number_of,
    open_mpi,
    port_of_job,
    torchrun,
)
from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.simple import ProcessClusterResolver
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver, expand_tasks_per_node
from stratagem.cluster.resolvers.tf_config import (
    SageMakerClusterResolver,
    TFConfigClusterResolver,
    tf_config,
)
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.cluster.spec import parse_task_index
from stratagem.errors import invalid

# Workers of Ray Train: their ranks from its context, address and secret of the run from rank 0.

RAY_TRAIN = "Ray Train"
_SECRET, _SECRET_FILE = "STRATAGEM_SECRET", "STRATAGEM_SECRET_FILE"


def ray_train() -> Processes | None:
    """Returns the workers of Ray Train; None outside its training functions.

    The first call with several workers waits for a call on each of them. They then share a new
    secret, unless the environment has one.
    """
    train: Any = sys.modules.get("ray.train")  # loaded in each of its workers
    if train is None:
        return None
    try:
        collective = importlib.import_module("ray.train.collective")
        context = train.get_context()
    # Another version of Ray Train, no worker, or a trial of Ray Tune.
    except (ImportError, RuntimeError, DeprecationWarning):
        return None
    num_processes, process_id = context.get_world_size(), context.get_world_rank()
    if num_processes == 1:
        return Processes(1, 0)
    # Ray has assigned the accelerators of the host to its workers, so their local ranks are unused.
    return Processes(num_processes, process_id, _meet(collective, is_leader=process_id == 0))


@functools.cache
def _meet(collective: Any, *, is_leader: bool) -> str:
    """Returns the address that rank 0 chose, and takes its secret."""
    offer = (_own_address(), secrets.token_hex(32)) if is_leader else None
    address, secret = collective.broadcast_from_rank_zero(offer)
    if environment.lookup(_SECRET) is None and environment.lookup(_SECRET_FILE) is None:
        environment.set_defaults({_SECRET: secret})
    return address


def _own_address() -> str:
    host = str(importlib.import_module("ray.util").get_node_ip_address())
    port = environment.lookup("JAX_COORDINATOR_PORT")
    return join_address(host, free_ports(1)[0] if port is None else port)


_SLURM_STEP = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_STEP_TASKS_PER_NODE",
)


def detect() -> ClusterResolver | None:
    """Returns a resolver for the first environment that describes a cluster.

    Tries `ENVIRONMENTS` in order: Ray Train, `TF_CONFIG`, Kubeflow Trainer's JAX jobs, torchrun,
    Kubeflow Trainer's torch jobs, Open MPI, Slurm, TPU hosts, SageMaker. Launchers come before the
    schedulers they may run in. In a training function of Ray Train, call it on every worker.

    Returns:
        The resolver, or None if no environment describes a cluster.

    Raises:
        ValueError: the variables of an environment are invalid.
        RuntimeError: the variables of a Slurm step are invalid.

    Example:
        >>> sg.cluster.detect() is None  # no launcher or scheduler started this process
        True

    Source: specific to Stratagem.
    """
    for make_resolver in ENVIRONMENTS.values():
        resolver = make_resolver()
        if resolver is not None:
            return resolver
    return None


def detect_with_servers() -> ClusterResolver:
    """Returns the resolver of a cluster that may have parameter servers.

    That is `TF_CONFIG`, which may be empty, or a Slurm step whose jobs are in
    `STRATAGEM_SLURM_JOBS`. Other environments have workers only.
    """
    if not tf_config().get("cluster") and environment.lookup("STRATAGEM_SLURM_JOBS"):
        return _slurm() or TFConfigClusterResolver()
    return TFConfigClusterResolver()


def _tf_config() -> ClusterResolver | None:
    return TFConfigClusterResolver() if tf_config().get("cluster") else None


def _launcher(
    name: str, read: Callable[[], Processes | None]
) -> Callable[[], ClusterResolver | None]:
    def make_resolver() -> ClusterResolver | None:
        processes = read()
        return None if processes is None else ProcessClusterResolver(processes, name)

    return make_resolver


def _slurm(gpus_per_node: int | None = None) -> ClusterResolver | None:
    if not all(map(environment.lookup, _SLURM_STEP)):
        return None
    # Two jobs on one host need different ports, unlike the resolver's default.
    job = environment.lookup("SLURM_JOB_ID")
    if job is None:
        return SlurmClusterResolver(gpus_per_node=gpus_per_node)
    tasks_of_hosts = expand_tasks_per_node(environment.lookup(_SLURM_STEP[-1]) or "")
    port_base = port_of_job(parse_task_index(job), num_ports=max(tasks_of_hosts))
    return SlurmClusterResolver(port_base=port_base, gpus_per_node=gpus_per_node)


def _tpu() -> ClusterResolver | None:
    """Returns a resolver on a TPU host; a TPU's name alone does not make this machine its host."""
    listed = environment.lookup("TPU_PROCESS_ADDRESSES") or environment.lookup(
        "TPU_WORKER_HOSTNAMES"
    )
    slices = environment.lookup("MEGASCALE_NUM_SLICES") or "1"
    if listed is None or ("," not in listed and slices == "1"):
        return None
    return TPUClusterResolver()


def _sagemaker() -> ClusterResolver | None:
    variables = ("SM_HOSTS", "SM_CURRENT_HOST")
    return SageMakerClusterResolver() if all(map(environment.lookup, variables)) else None


ENVIRONMENTS: dict[str, Callable[[], ClusterResolver | None]] = {
    "Ray Train": _launcher(RAY_TRAIN, ray_train),
    "TF_CONFIG": _tf_config,
    "Kubeflow Trainer, JAX": _launcher("Kubeflow Trainer", kubeflow_jax),
    "torchrun": _launcher("torchrun", torchrun),
    "Kubeflow Trainer, torch": _launcher("Kubeflow Trainer", kubeflow_torch),
    "Open MPI": _launcher("Open MPI", open_mpi),
    "Slurm": _slurm,
    "TPU": _tpu,
    "SageMaker": _sagemaker,
}


# Nodes: machines on each of which a scheduler has started this program once.

# As for torchrun.
LAUNCH_PORT = 29400
# Number of nodes, rank of this one, and address of node 0; None for what is not known.
_Node = tuple[int | None, int | None, str | None]


def detect_node() -> _Node:
    """Returns what a scheduler says of the nodes: their number, this one's rank, node 0's address.

    Tries Kubeflow Trainer, Open MPI, Slurm and Indexed Jobs of Kubernetes. A pod of the last knows
    its rank, and pod 0 if it has a name in a headless service, but not the number of pods. Raises
    ValueError if this program was started several times on a node, or for invalid variables;
    RuntimeError for those of a Slurm step.
    """
    index = number_of("JOB_COMPLETION_INDEX")
    if index is not None:
        trainer = kubeflow_jax() or kubeflow_torch()
        if trainer is not None:
            return trainer.num_processes, trainer.process_id, trainer.coordinator_address
    found = open_mpi()
    if found is not None and found.num_processes > 1:
        return _once_on_each(found, found.num_local_processes, "mpirun", "--map-by ppr:1:node")
    # Without accelerators, which are for the processes that this one starts.
    resolver = _slurm(gpus_per_node=0)
    found = None if resolver is None else resolver.processes()
    if found is not None and found.num_processes > 1:
        most = max(expand_tasks_per_node(environment.lookup(_SLURM_STEP[-1]) or ""))
        return _once_on_each(found, most, "srun", "--ntasks-per-node=1")
    return None, index, None if index is None else _first_pod(index)


def _once_on_each(found: Processes, most_on_one: int | None, starter: str, option: str) -> _Node:
    if most_on_one != 1:
        raise invalid(
            f"{starter} started {found.num_processes} launchers, several on one node.",
            expected="one launcher per node, which starts the workers of its node.",
            fix=f"use {starter} {option} stratagem launch --workers N; or start each worker by "
            f"{starter} python train.py, without the launcher.",
        )
    return found.num_processes, found.process_id, found.coordinator_address


def _first_pod(index: int) -> str | None:
    """Returns the address of pod 0; None if the pods have no names in a headless service."""
    name, _, domain = own_name().partition(".")
    if not domain or not name.endswith(f"-{index}"):
        return None
    return join_address(f"{name.removesuffix(str(index))}0.{domain}", LAUNCH_PORT)
