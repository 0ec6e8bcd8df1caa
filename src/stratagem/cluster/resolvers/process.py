"""Resolver for launchers that give only a rank, a process count and a coordinator address."""

from __future__ import annotations

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import explain


class ProcessClusterResolver(ClusterResolver):
    """A cluster of workers with a known number, rank and coordinator address.

    Every process is a worker, its rank is its task id, and process 0 is the coordinator. The
    cluster spec is sparse and contains only worker 0; `processes()` returns the number of
    processes.

    Args:
        processes: number, rank and coordinator from the launcher.
        environment: name of the launcher.

    Raises:
        TypeError: `processes` is not a `Processes`.

    Example:
        >>> processes = sg.cluster.Processes(4, 2, "10.0.0.1:2222")
        >>> resolver = sg.cluster_resolver.ProcessClusterResolver(processes, "torchrun")
        >>> resolver.task_type, resolver.task_id, resolver.cluster_spec()
        ('worker', 2, ClusterSpec({'worker': ['10.0.0.1:2222']}))

    Source: specific to Stratagem.
    """

    _is_local = True

    def __init__(self, processes: Processes, environment: str = "") -> None:
        if not isinstance(processes, Processes):
            raise TypeError(
                explain(
                    f"processes={processes!r} is of type {type(processes).__name__}.",
                    expected="an sg.cluster.Processes.",
                    fix="pass Processes(num_processes, process_id, coordinator_address).",
                )
            )
        self._processes = processes
        self._environment = environment
        self._task_type = "worker"
        self._task_id = processes.process_id

    def cluster_spec(self) -> ClusterSpec:
        """Returns the only task with a known address.

        Returns:
            Worker 0; an empty spec for a single process without an address.
        """
        address = self._processes.coordinator_address
        return ClusterSpec({} if address is None else {"worker": {0: address}})

    def processes(self) -> Processes:
        """Returns the processes passed to the constructor.

        Returns:
            The same object.
        """
        return self._processes

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the coordinator's address, the only known one.

        Args:
            task_type: "worker", or None.
            task_id: 0, or None.
            rpc_layer: prefix of the address.

        Returns:
            The address; "" for a single process.

        Raises:
            ValueError: another task.
        """
        if self._processes.num_processes == 1:
            return ""
        return super().master(task_type, 0 if task_id is None else task_id, rpc_layer)
