"""Detection of the cluster from environment variables of launchers and schedulers."""

from __future__ import annotations

from collections.abc import Callable

from stratagem import environment
from stratagem.cluster.launchers import (
    kubeflow_jax,
    kubeflow_torch,
    open_mpi,
    port_of_job,
    torchrun,
)
from stratagem.cluster.processes import Processes
from stratagem.cluster.ray_train import RAY_TRAIN, ray_train
from stratagem.cluster.resolvers.process import ProcessClusterResolver
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.resolvers.sagemaker import SageMakerClusterResolver
from stratagem.cluster.resolvers.slurm import SlurmClusterResolver
from stratagem.cluster.resolvers.tf_config import TFConfigClusterResolver, tf_config
from stratagem.cluster.resolvers.tpu import TPUClusterResolver
from stratagem.cluster.slurm_expressions import expand_tasks_per_node
from stratagem.cluster.spec import parse_task_index

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
        >>> list(sg.cluster.ENVIRONMENTS)[:3]
        ['Ray Train', 'TF_CONFIG', 'Kubeflow Trainer, JAX']

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


def _slurm() -> ClusterResolver | None:
    if not all(map(environment.lookup, _SLURM_STEP)):
        return None
    # Two jobs on one host need different ports, unlike the resolver's default.
    job = environment.lookup("SLURM_JOB_ID")
    if job is None:
        return SlurmClusterResolver()
    tasks_of_hosts = expand_tasks_per_node(environment.lookup(_SLURM_STEP[-1]) or "")
    port_base = port_of_job(parse_task_index(job), num_ports=max(tasks_of_hosts))
    return SlurmClusterResolver(port_base=port_base)


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
