"""Machine resources and CPU threads requested by each server and worker."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from stratagem import environment
from stratagem.cluster.spec import ClusterSpec
from stratagem.launch.remote.ray.leader import leader_of
from stratagem.launch.remote.ray.ray_cluster import load_ray
from stratagem.launch.remote.ray.ray_nodes import resource_of_task

# XLA's number of CPU threads, read when JAX creates its backend.
_NUM_THREADS = "NPROC"

_Resources = Sequence[Mapping[str, float]] | None


@dataclasses.dataclass(frozen=True)
class Placing:
    """Resources of the machines that processes may be placed on.

    Args:
        by_task: True if each machine is reserved for one task of `TF_CONFIG`.
        by_role: True if machines offer the Ray resources "ps" and "worker", as in our manifests.
        num_cpus: CPUs of an existing Ray cluster; 0 if CPUs are not counted.
        num_gpus: GPUs of an existing Ray cluster.
        num_cores: cores of the machine if all processes share one, else 0.
    """

    by_task: bool = False
    by_role: bool = False
    num_cpus: int = 0
    num_gpus: int = 0
    num_cores: int = 0

    @classmethod
    def here(cls) -> Placing:
        """Returns the resources of this machine, for forked processes."""
        return cls(num_cores=_num_cores())

    @classmethod
    def now(cls, spec: ClusterSpec | None, *, is_own: bool) -> Placing:
        """Returns the resources of the connected Ray cluster.

        `spec` is the cluster of `TF_CONFIG`, if any. `is_own` is True if this process started Ray.
        """
        ray = load_ray()
        is_one = spec is None and sum(node["Alive"] for node in ray.nodes()) == 1
        num_cores = _num_cores() if is_one else 0
        if is_own:
            return cls(num_cores=num_cores)
        there = ray.cluster_resources()
        if spec is not None and resource_of_task(*leader_of(spec)) in there:
            return cls(by_task=True)
        return cls(
            by_role={"ps", "worker"} <= there.keys(),
            num_cpus=int(there.get("CPU", 0)),
            num_gpus=int(there.get("GPU", 0)),
            num_cores=num_cores,
        )

    def threads(self, count: int) -> dict[str, str]:
        """Returns environment variables that divide the cores among `count` busy processes.

        With a thread per core in each process, the threads of one operation wait for each other.
        Virtual devices need threads for each device, so nothing is limited for them.
        """
        has_virtual = environment.lookup("JAX_NUM_CPU_DEVICES") is not None
        has_virtual |= environment.num_forced_cpu_devices() > 1
        if not self.num_cores or has_virtual or environment.lookup(_NUM_THREADS) is not None:
            return {}
        return {_NUM_THREADS: str(max(1, self.num_cores // count))}

    def of_servers(self, count: int) -> _Resources:
        """Returns the resources of each of `count` servers; None if they need none."""
        return self._of_tasks("ps", count) or self._shares("ps", count, 0)

    def of_workers(self, count: int) -> _Resources:
        """Returns the resources of each of `count` workers; None if they need none."""
        return self._of_tasks("worker", count) or self._shares(
            "worker", count, self.num_gpus // count
        )

    def _of_tasks(self, task_type: str, count: int) -> _Resources:
        if not self.by_task:
            return None
        return [{resource_of_task(task_type, index): 1} for index in range(count)]

    def _shares(self, role: str, count: int, num_gpus: int) -> _Resources:
        """Splits GPUs equally; adds a CPU each if enough for all and the coordinator."""
        share = {"GPU": num_gpus} if num_gpus else {}
        if self.by_role:
            share[role] = 1
        elif self.num_cpus > 2 * count:
            share["CPU"] = 1
        return [share] * count if share else None


def _num_cores() -> int:
    """Returns the number of cores this process may use, or all where the OS cannot say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
