"""`ClusterResolver`: the base class of all resolvers."""

from __future__ import annotations

import abc
import contextlib

from stratagem.cluster.accelerators import local_gpus
from stratagem.cluster.processes import Processes, processes_of_task
from stratagem.cluster.spec import ClusterSpec, parse_task_index, table_of_tasks
from stratagem.logs import PublicDir, as_html


class ClusterResolver(PublicDir, abc.ABC):
    """Finds the cluster of this process and its task in the cluster.

    Subclasses define `cluster_spec` and set `_task_type`, `_task_id`, `_rpc_layer` and
    `_environment` if known. For values to be looked up on each access, they define
    `_find_task` and `_find_rpc_layer`; values that were set take precedence.

    Example:
        >>> class FileResolver(sg.cluster_resolver.ClusterResolver):
        ...     def __init__(self, lines, task_id):
        ...         self._lines, self._task_type, self._task_id = lines, "worker", task_id
        ...     def cluster_spec(self):
        ...         return sg.ClusterSpec({"worker": self._lines})
        >>> resolver = FileResolver(["a:2222", "b:2222"], task_id=1)
        >>> resolver.master(), resolver.processes().coordinator_address
        ('b:2222', 'a:2222')

    Source: TF 2.21 cluster_resolver.py, ClusterResolver.
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = ""
    _is_local = False  # True if the cluster is known without a request to another machine

    def __repr__(self) -> str:
        name, known = type(self).__name__, self._known()
        if known is None:
            return f"{name}()"
        spec, task = known
        return f"{name}({spec}, task={task!r})"

    def _repr_html_(self) -> str:
        name, known = type(self).__name__, self._known()
        if known is None:
            return as_html([f"{name}: the cluster is looked up when it is used."])
        spec, task = known
        return as_html([f"{name}: this is {task}", table_of_tasks(spec)])

    def _known(self) -> tuple[ClusterSpec, str] | None:
        """Returns the cluster and the name of this task; None if that takes a request or fails."""
        if not self._is_local:
            return None
        with contextlib.suppress(Exception):  # printing a resolver never raises
            task = " ".join(
                str(part) for part in (self.task_type, self.task_id) if part is not None
            )
            return self.cluster_spec(), task or "no task"
        return None

    @abc.abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Returns the current cluster.

        Returns:
            Its tasks and their addresses; an empty spec without a cluster.
        """

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
    ) -> str:
        """Returns the address of a task, to which a TensorFlow 1 session would connect.

        Args:
            task_type: type of the task; None for this process's.
            task_id: index of the task; None for this process's.
            rpc_layer: prefix of the address; None for the resolver's.

        Returns:
            The address; "" if no task is passed and this process's is unknown.

        Raises:
            ValueError: the task is not in the cluster.
        """
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        if task_type is None or task_id is None:
            return ""
        address = self.cluster_spec().task_address(task_type, task_id)
        return master_url(address, rpc_layer or self.rpc_layer)

    def num_accelerators(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        config_proto: object = None,
    ) -> dict[str, int]:
        """Returns the number of accelerators visible to this process, by kind.

        Counted with `CUDA_VISIBLE_DEVICES` or `nvidia-smi`, without starting a backend.

        Args:
            task_type: type of the task; None for this process's.
            task_id: index of the task; None for this process's.
            config_proto: ignored.

        Returns:
            A dict such as `{"GPU": 8}`; empty without accelerators, and for another task.

        Raises:
            RuntimeError: the GPU driver does not answer.
        """
        del config_proto
        if task_type not in (None, self.task_type) or task_id not in (None, self.task_id):
            return {}
        gpus = local_gpus()
        return {"GPU": len(gpus)} if gpus else {}

    def processes(self) -> Processes:
        """Returns the processes that train together, and the rank of this one.

        Returns:
            The arguments of `jax.distributed.initialize`.

        Raises:
            ValueError: the cluster is invalid, or this task does not train in lockstep.
        """
        return processes_of_task(self.cluster_spec(), self.task_type, self.task_id)

    @property
    def environment(self) -> str | None:
        """Name of the environment; "" for an ordinary one."""
        return self._environment

    @property
    def task_type(self) -> str | None:
        """Type of this process's task; None if unknown."""
        return self._find_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """Index of this process's task among the tasks of its type; None if unknown."""
        return self._find_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | str | None) -> None:
        self._task_id = None if task_id is None else parse_task_index(task_id)

    @property
    def rpc_layer(self) -> str | None:
        """Prefix of the addresses that `master` returns; None for no prefix."""
        return self._find_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _find_task(self) -> tuple[str | None, int | None]:
        return None, None

    def _find_rpc_layer(self) -> str | None:
        return None


def master_url(address: str, rpc_layer: str | None) -> str:
    """Returns an address with its prefix, such as `grpc://host:port`.

    Source: TF 2.21 cluster_resolver.py, format_master_url.
    """
    return f"{rpc_layer}://{address}" if rpc_layer else address


def has_one_task(spec: ClusterSpec) -> bool:
    """True for a cluster with at most one task."""
    return sum(map(spec.num_tasks, spec.jobs)) <= 1
