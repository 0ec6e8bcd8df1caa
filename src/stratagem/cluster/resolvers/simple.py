"""Resolvers for a cluster that the caller specifies, and for a rank and a number of processes."""

from __future__ import annotations

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver, master_url
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import check_type


class SimpleClusterResolver(ClusterResolver):
    """A cluster, and the task of this process, specified by the caller.

    Args:
        cluster_spec: the cluster.
        master: result of `master()`.
        task_type: type of this process's task.
        task_id: index of this process's task.
        environment: name of the environment.
        num_accelerators: accelerators per task by kind, such as `{"GPU": 8}`.
        rpc_layer: prefix of addresses, such as "grpc".

    Raises:
        TypeError: `cluster_spec` is not a `ClusterSpec`, or `master` is not a string.

    Example:
        >>> spec = sg.ClusterSpec({"worker": ["a:1", "b:1"]})
        >>> resolver = sg.cluster_resolver.SimpleClusterResolver(spec, "", "worker", 1)
        >>> resolver.processes().process_id
        1

    Source: TF 2.21 cluster_resolver.py, SimpleClusterResolver.
    """

    _is_local = True

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        fix = "pass sg.ClusterSpec(cluster_spec)."
        check_type("cluster_spec", cluster_spec, ClusterSpec, "a ClusterSpec", fix)
        check_type("master", master, str, "a string", 'pass an address, or "" for none.')
        self._cluster_spec = cluster_spec
        self._master = master
        self.task_type = task_type
        self.task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the cluster passed to the constructor.

        Returns:
            The same object.
        """
        return self._cluster_spec

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, or without a task the `master` passed to the constructor.

        Args:
            task_type: type of the task.
            task_id: index of the task.
            rpc_layer: prefix of the address; None for the resolver's.

        Returns:
            The address.

        Raises:
            ValueError: the task is not in the cluster.
        """
        address = self._master
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        return master_url(address, rpc_layer or self._rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the accelerators passed to the constructor.

        Args:
            task_type: ignored.
            task_id: ignored.
            config_proto: ignored.

        Returns:
            The dict, or an empty one.
        """
        del task_type, task_id, config_proto
        return {} if self._num_accelerators is None else self._num_accelerators


# Resolver for launchers that give only a rank, a process count and a coordinator address.


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
        fix = "pass Processes(num_processes, process_id, coordinator_address)."
        check_type("processes", processes, Processes, "an sg.cluster.Processes", fix)
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
