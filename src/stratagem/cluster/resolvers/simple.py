"""Resolvers that the caller gives: a cluster, and a union of other resolvers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver, master_url
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import check_type, explain, invalid


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


# Union of several resolvers.


_T = TypeVar("_T")


class UnionResolver(ClusterResolver):
    """Combines the jobs of several resolvers; other facts come from the first that has them.

    Args:
        *resolvers: resolvers in order of precedence.
        task_type: overrides theirs.
        task_id: overrides theirs.
        rpc_layer: overrides theirs.
        **unknown: rejected.

    Raises:
        TypeError: an argument is not a `ClusterResolver`.
        ValueError: no resolver, or an unknown keyword.

    Example:
        >>> Simple = sg.cluster_resolver.SimpleClusterResolver
        >>> union = sg.cluster_resolver.UnionResolver(
        ...     Simple(sg.ClusterSpec({"worker": ["a:1"]})), Simple(sg.ClusterSpec({"ps": ["b:1"]}))
        ... )
        >>> union.cluster_spec()
        ClusterSpec({'ps': ['b:1'], 'worker': ['a:1']})

    Source: TF 2.21 cluster_resolver.py, UnionClusterResolver.
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise invalid(
                f"UnionResolver received {unknown!r}.",
                expected="resolvers, and task_type, task_id or rpc_layer.",
                fix="correct the keyword.",
            )
        if not resolvers:
            raise invalid(
                "UnionResolver received no resolver.",
                expected="at least one.",
                fix="pass resolvers: UnionResolver(first, second).",
            )
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(
                    explain(
                        f"UnionResolver received {resolver!r}, a {type(resolver).__name__}.",
                        expected="instances of ClusterResolver.",
                        fix="wrap a cluster in SimpleClusterResolver(ClusterSpec(cluster)).",
                    )
                )
        self._resolvers = resolvers
        self.task_type = task_type
        self.task_id = task_id
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Returns the jobs of all resolvers.

        For a job of several resolvers, lists are concatenated, including duplicates. If one is
        sparse, tasks keep their indices.

        Returns:
            The cluster.

        Raises:
            KeyError: two resolvers have the same index of a job that is sparse in one of them.
        """
        jobs: dict[str, list[list[str] | dict[int, str]]] = {}
        for resolver in self._resolvers:
            for job, tasks in resolver.cluster_spec().as_dict().items():
                jobs.setdefault(job, []).append(tasks)
        return ClusterSpec({job: _merged(job, parts) for job, parts in jobs.items()})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, or without a task the first resolver's master.

        Args:
            task_type: type of the task.
            task_id: index of the task.
            rpc_layer: prefix of the address.

        Returns:
            The address, or "".

        Raises:
            ValueError: the task is not in the cluster.
        """
        if task_type is not None and task_id is not None:
            address = self.cluster_spec().task_address(task_type, task_id)
            return master_url(address, rpc_layer or self.rpc_layer)
        masters = (resolver.master(rpc_layer=rpc_layer) for resolver in self._resolvers)
        return next(filter(None, masters), "")

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the accelerators of the first resolver that has any.

        Args:
            task_type: type of the task.
            task_id: index of the task.
            config_proto: passed on.

        Returns:
            Their numbers by kind.
        """
        numbers = (r.num_accelerators(task_type, task_id, config_proto) for r in self._resolvers)
        return next(filter(None, numbers), {})

    def processes(self) -> Processes:
        """Returns the processes of the combined cluster, or a single resolver's processes.

        Returns:
            The arguments of `jax.distributed.initialize`.

        Raises:
            ValueError: the cluster is invalid, or this task does not train in lockstep.
        """
        [first, *others] = self._resolvers
        if not others and (self.task_type, self.task_id) == (first.task_type, first.task_id):
            return first.processes()
        return super().processes()

    @property
    def environment(self) -> str | None:
        """First environment with a name."""
        return next(filter(None, (resolver.environment for resolver in self._resolvers)), "")

    def _find_task(self) -> tuple[str | None, int | None]:
        return (
            _first(resolver.task_type for resolver in self._resolvers),
            _first(resolver.task_id for resolver in self._resolvers),
        )

    def _find_rpc_layer(self) -> str | None:
        return _first(resolver.rpc_layer for resolver in self._resolvers)


def _first(values: Iterable[_T | None]) -> _T | None:
    return next((value for value in values if value is not None), None)


def _merged(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    parts = [part for part in parts if part]
    if all(isinstance(part, list) for part in parts):
        return [address for part in parts for address in part if isinstance(address, str)]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        duplicates = sorted(merged.keys() & tasks.keys())
        if duplicates:
            # KeyError quotes its message, which makes line breaks unreadable.
            raise KeyError(
                f"Two resolvers have indices {duplicates} of job {job!r}, which is sparse in one "
                "of them. Expected each index once. Fix: renumber the tasks of one resolver."
            )
        merged.update(tasks)
    return merged
