"""Union of several resolvers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from stratagem.cluster.processes import Processes
from stratagem.cluster.resolvers.resolver import ClusterResolver, master_url
from stratagem.cluster.spec import ClusterSpec
from stratagem.errors import explain, invalid

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
