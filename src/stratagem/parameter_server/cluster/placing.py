"""Resources that each server and worker requests of its machine."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from stratagem import environment
from stratagem.cluster import ClusterSpec
from stratagem.remote.ray.leader import leader_of
from stratagem.remote.ray.ray_cluster import load_ray
from stratagem.remote.ray.ray_nodes import resource_of_task

__all__ = ["Placing"]

# How many threads XLA computes with on the CPU; read when JAX makes its backend.
_NUM_THREADS = "NPROC"

_Resources = Sequence[Mapping[str, float]] | None


@dataclasses.dataclass(frozen=True)
class Placing:
    """Machines on which processes may be placed.

    Args:
        by_task: whether each machine of the cluster is that of one task.
        by_role: whether each has a piece of "ps" or of "worker", as those of our manifests.
        num_cpus: of a cluster that others have started; 0 where CPUs are not counted.
        num_gpus: likewise.
        num_cores: of the machine that all processes are on; 0 where there are several.
    """

    by_task: bool = False
    by_role: bool = False
    num_cpus: int = 0
    num_gpus: int = 0
    num_cores: int = 0

    @classmethod
    def here(cls) -> Placing:
        """Returns that of processes that this one starts on its own machine."""
        return cls(num_cores=_num_cores())

    @classmethod
    def now(cls, spec: ClusterSpec | None, *, is_own: bool) -> Placing:
        """Returns that of the cluster that this process is connected to.

        Args:
            spec: the tasks that `TF_CONFIG` names; None for none.
            is_own: whether this process has started the cluster.
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
        """Returns variables by which each of some processes computes with its part of the cores.

        With as many threads as cores in each, those of one operation wait for each other. Where
        workers have virtual devices, each device needs threads of its own.

        Args:
            count: how many processes compute at a time.
        """
        has_virtual = environment.lookup("JAX_NUM_CPU_DEVICES") is not None
        has_virtual |= environment.num_forced_cpu_devices() > 1
        if not self.num_cores or has_virtual or environment.lookup(_NUM_THREADS) is not None:
            return {}
        return {_NUM_THREADS: str(max(1, self.num_cores // count))}

    def of_servers(self, count: int) -> _Resources:
        """Returns what each server needs; None for nothing.

        Args:
            count: how many there are.
        """
        return self._of_tasks("ps", count) or self._shares("ps", count, 0)

    def of_workers(self, count: int) -> _Resources:
        """Returns what each worker needs; None for nothing.

        Args:
            count: how many there are.
        """
        return self._of_tasks("worker", count) or self._shares(
            "worker", count, self.num_gpus // count
        )

    def _of_tasks(self, task_type: str, count: int) -> _Resources:
        if not self.by_task:
            return None
        return [{resource_of_task(task_type, index): 1} for index in range(count)]

    def _shares(self, role: str, count: int, num_gpus: int) -> _Resources:
        """GPUs in equal parts; a CPU each where there are enough for all and the coordinator."""
        share = {"GPU": num_gpus} if num_gpus else {}
        if self.by_role:
            share[role] = 1
        elif self.num_cpus > 2 * count:
            share["CPU"] = 1
        return [share] * count if share else None


def _num_cores() -> int:
    """Those that this process may use; not every system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
