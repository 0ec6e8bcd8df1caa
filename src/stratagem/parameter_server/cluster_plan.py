"""Plans of parameter-server clusters, and interfaces of a running one."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from stratagem.cluster.detection import detect_with_servers
from stratagem.cluster.processes import check_addresses
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.cluster.roles import check_task, id_in_cluster, task_count, worker_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.devices.mesh import Topology
from stratagem.errors import check_number, check_type, invalid
from stratagem.execution.programs.lockstep import Lockstep
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.resources import Closing, checked_folder
from stratagem.strategies.membership import copy_refused
from stratagem.strategies.strategy import NonTraining, Strategy
from stratagem.variables.placement import Replicated

# Checks of the cluster given to a parameter-server strategy, and roles of its tasks.

_JOBS = {"num_workers": "worker", "num_servers": "ps"}


def checked_cluster(
    resolver: ClusterResolver | None, strategy: str
) -> tuple[ClusterResolver, ClusterSpec]:
    """Returns the resolver and cluster of a strategy; the cluster is empty without one.

    `resolver=None` reads `TF_CONFIG`, or a Slurm step with servers. Raises a TypeError or
    ValueError for a resolver of another type, without a cluster, or with invalid tasks or
    addresses.

    Source: TF 2.21 parameter_server_strategy_v2.py, _verify_args_and_config.
    """
    if resolver is not None:
        check_type("cluster_resolver", resolver, ClusterResolver)
    used = resolver or detect_with_servers()
    spec = used.cluster_spec()
    if resolver is not None and not spec:
        raise invalid(
            f"cluster_resolver={type(resolver).__name__} of {strategy} has an empty cluster.",
            expected="a cluster with tasks.",
            fix="set TF_CONFIG or pass a cluster_spec; omit cluster_resolver to start all "
            "processes on this machine.",
        )
    if spec:
        is_chief_alone = used.task_type == "chief" and used.task_id is None
        check_task(spec, used.task_type or None, 0 if is_chief_alone else used.task_id)
        check_addresses(spec)
    return used, spec


def check_counts(spec: ClusterSpec) -> None:
    """Raises a ValueError unless a coordinator's cluster has a server and a worker."""
    counts = {job: task_count(spec, job) for job in ("ps", "worker")}
    if not all(counts.values()):
        raise invalid(
            f"The cluster has {counts['ps']} ps and {counts['worker']} worker tasks.",
            expected="at least one of each.",
            fix='list them in TF_CONFIG: {"cluster": {"chief": [...], "ps": [...], '
            '"worker": [...]}}.',
            code="SG511",
        )


def refuse_numbers(spec: ClusterSpec, **numbers: int | None) -> None:
    """Raises a ValueError for a `num_workers` or `num_servers` other than None with a cluster."""
    for name, number in numbers.items():
        if number is not None:
            job = _JOBS[name]
            raise invalid(
                f"{name}={number!r} was passed for a cluster with {task_count(spec, job)} "
                f"{job} tasks.",
                expected=f"{name} only without a cluster.",
                fix=f"omit {name}.",
            )


def is_non_training(
    spec: ClusterSpec, task: tuple[str | None, int | None], *, independent: bool
) -> bool:
    """Returns True for a task that runs the common program but does not train.

    `task` is the type and index of this process; `independent` means that workers train without a
    coordinator. Raises a ValueError if the cluster has no such task.
    """
    task_type, index = task
    is_cluster = bool(spec) and task_count(spec, "ps") > 0 and index is not None
    has_chief = is_cluster and task_count(spec, "chief") > 0
    others = ("ps", "evaluator") if independent else ("ps", "evaluator", "worker")
    is_other = is_cluster and (independent or has_chief) and task_type in others
    if is_other and (task_type != "evaluator" or "evaluator" in spec.jobs):
        check_task(spec, task_type, index)
    return is_other


# `CoordinatorOptions`: time and failure limits of a parameter-server cluster.


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordinatorOptions:
    """Limits of a parameter-server cluster, for `ParameterServerStrategy(options=)`.

    Args:
        start_delay_s: stagger between workers: worker k takes its first function k times this many
            seconds after the coordinator was created, so that the first updates come from few
            workers.
        recovery_timeout_s: seconds that a server or worker may be silent, for example during a
            restart, before callers get an error; None for `STRATAGEM_PEER_TIMEOUT_S`.
        max_transient_failures: number of consecutive functions that may fail because their workers
            cannot reach a server. They are retried; one more raises `PSUnavailableError`.
        journal_interval_s: seconds between journal entries of a server. If the server dies, changes
            since the last entry are lost.
        durable_updates: True makes servers answer each update only once it is in the journal, on
            disk: then no answered update is lost with a server. Each update waits for the disk.

    Raises:
        ValueError: a negative or non-numeric value, or a time limit of 0 s.

    Example:
        >>> sg.coordinator.options(recovery_timeout_s=120).recovery_timeout_s
        120

    Source: TF 2.21 cluster_coordinator.py, TF_COORDINATOR_SCHEDULE_START_DELAY and
    TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES.
    """

    start_delay_s: float = 0.0
    recovery_timeout_s: float | None = None
    max_transient_failures: int = 0
    journal_interval_s: float = 1.0
    durable_updates: bool = False

    def __post_init__(self) -> None:
        owner = "sg.coordinator.options"
        check_number(owner, 0.0, start_delay_s=self.start_delay_s)
        check_number(owner, above=0, or_none=True, recovery_timeout_s=self.recovery_timeout_s)
        check_number(owner, 0, max_transient_failures=self.max_transient_failures)
        check_number(owner, above=0, journal_interval_s=self.journal_interval_s)


def checked_options(options: CoordinatorOptions | None, *, independent: bool) -> CoordinatorOptions:
    """Returns the user's options, or the defaults for None.

    `independent` workers schedule no functions, so limits on these raise a ValueError.
    """
    if options is None:
        return CoordinatorOptions()
    check_type("options", options, CoordinatorOptions)
    if independent and (options.start_delay_s or options.max_transient_failures):
        raise invalid(
            f"A strategy that schedules no functions received {options}.",
            expected="no limits on scheduled functions.",
            fix="omit start_delay_s and max_transient_failures.",
        )
    return options


_LOCAL_WORKERS = 2
_LOCAL_SERVERS = 2


@dataclasses.dataclass(frozen=True)
class JournalPlan:
    """Journals of a cluster's servers: the folder, and seconds between entries.

    `folder=None` selects one of this run. `is_durable` answers an update only once it is on disk.
    `is_temporary` removes a journal when its server closes.
    """

    folder: str | None = None
    interval_s: float = 1.0
    is_durable: bool = False
    is_temporary: bool = False


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """Number and machines of a cluster's processes.

    `spec` has the machine of each task; None means this machine. `task` is the type and index of
    this process if each worker runs its own program, None in a coordinator. `strategy` is a name
    for messages.
    """

    num_workers: int
    num_servers: int
    spec: ClusterSpec | None = None
    journals: JournalPlan = JournalPlan()
    task: tuple[str, int] | None = None
    strategy: str = "ParameterServerStrategy"

    def __post_init__(self) -> None:
        has_workers = self.strategy == "ParameterServerStrategy"
        for name in ("num_workers", "num_servers") if has_workers else ("num_servers",):
            check_number(self.strategy, **{name: getattr(self, name)})

    @classmethod
    def local(cls, num_workers: int | None, num_servers: int | None) -> ClusterPlan:
        """Returns the plan of a cluster on this machine; None selects the default count."""
        return cls(
            _LOCAL_WORKERS if num_workers is None else num_workers,
            _LOCAL_SERVERS if num_servers is None else num_servers,
        )

    @classmethod
    def of(cls, spec: ClusterSpec, task_type: str | None) -> ClusterPlan:
        """Returns the plan of a coordinator's cluster; raises a ValueError in any other task."""
        check_counts(spec)
        if task_type not in (None, "", "chief"):
            raise invalid(
                f"A ParameterServerStrategy was created in a task of type {task_type!r}.",
                expected="the chief, which coordinates the other tasks.",
                fix="run `stratagem server` or sg.run_standard_server().join() in this task.",
                code="SG511",
            )
        return cls(spec.num_tasks("worker"), spec.num_tasks("ps"), spec)

    @classmethod
    def independent(cls, spec: ClusterSpec, task: tuple[str | None, int | None]) -> ClusterPlan:
        """Returns the plan of a cluster whose workers each run their own program.

        `task` is the type and index of this process. Raises a ValueError unless it is a worker of a
        cluster with servers.
        """
        task_type, index = task
        num_servers = spec.num_tasks("ps") if "ps" in spec.jobs else 0
        if task_type not in ("chief", "worker") or index is None or not num_servers:
            raise invalid(
                f"independent=True was used in task {task!r} of a cluster with {num_servers} "
                "ps tasks.",
                expected="the chief or a worker of a cluster with at least one ps task.",
                fix='list both in TF_CONFIG: {"cluster": {"worker": [...], "ps": [...]}, '
                '"task": {"type": "worker", "index": 0}}; run `stratagem server` as ps.',
                code="SG511",
            )
        id_in_cluster(spec, task_type, index)  # raises for an unknown task
        return cls(worker_count(spec, task_type), num_servers, spec, task=(task_type, index))

    @classmethod
    def servers_only(
        cls, spec: ClusterSpec, task_type: str | None, num_servers: int | None
    ) -> ClusterPlan:
        """Returns the plan of servers with this process as their only client.

        An empty `spec` means this machine, where `num_servers=None` selects the default count.
        Raises a ValueError for a cluster of anything but a chief and ps tasks, or outside its
        chief.
        """
        if not spec:
            count = _LOCAL_SERVERS if num_servers is None else num_servers
            return cls(0, count, strategy="HybridStrategy")
        if {"chief", "ps"} - {*spec.jobs} or "worker" in spec.jobs or task_type != "chief":
            raise invalid(
                f"A HybridStrategy was created in a task of type {task_type!r} of a cluster "
                f"with the jobs {sorted(spec.jobs)}.",
                expected="the chief of a cluster with ps tasks and no workers: its replicas "
                "are devices of this process.",
                fix='set TF_CONFIG to {"cluster": {"chief": [...], "ps": [...]}, "task": '
                '{"type": "chief", "index": 0}}; run `stratagem server` as ps.',
                code="SG511",
            )
        refuse_numbers(spec, num_servers=num_servers)
        return cls(0, spec.num_tasks("ps"), spec, strategy="HybridStrategy")

    def with_journals(
        self, journal_dir: str | os.PathLike[str] | None, limits: CoordinatorOptions
    ) -> ClusterPlan:
        """Returns the plan with another journal folder; None for a folder of this run."""
        folder = None if journal_dir is None else checked_folder("journal_dir", journal_dir)
        journals = JournalPlan(folder, limits.journal_interval_s, limits.durable_updates)
        return dataclasses.replace(self, journals=journals)


class Cluster(Protocol):
    """Running servers, and workers to start."""

    @property
    def keys(self) -> ClusterKeys:
        """Encryption keys of the cluster."""
        ...

    @property
    def server_addresses(self) -> list[str]:
        """Addresses of the servers, by index."""
        ...

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        ...

    def report_moves_to(
        self,
        on_moved: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None] = ...,
    ) -> None:
        """Registers what is called with the index and new address of a restarted server.

        `on_given_up` gets the index of a server that will not be started again, and why.
        """
        ...

    def start_workers(self) -> Any:
        """Starts the workers; see `LocalProcesses` and `RayProcesses`."""
        ...

    def close(self) -> None:
        """Stops the servers."""
        ...


def update_mode(
    num_workers: int,
    *,
    synchronous: bool,
    backup_workers: int,
    max_staleness: int | None,
) -> UpdateMode:
    """Returns the mode in which servers apply gradients; raises a ValueError for invalid counts.

    A synchronous update does not wait for `backup_workers` of the workers. `max_staleness` limits
    the age, in updates, of the values that gradients are computed from.
    """
    is_count = isinstance(backup_workers, int) and not isinstance(backup_workers, bool)
    if not is_count or not 0 <= backup_workers < (num_workers if synchronous else 1):
        raise invalid(
            f"backup_workers={backup_workers!r} was passed for {num_workers} workers"
            f"{'' if synchronous else ' without synchronous=True'}.",
            expected="an integer from 0 to the number of workers minus 1, and 0 for "
            "asynchronous updates.",
            fix="pass synchronous=True or a smaller number, or omit backup_workers.",
        )
    return UpdateMode(num_workers - backup_workers if synchronous else 0, max_staleness)


# Base of strategies with variables on parameter servers, in any process of the cluster.


@dataclasses.dataclass
class ProcessParts:
    """Topology, placement and executor of one process, and its connections."""

    topology: Topology
    placement: Replicated
    executor: Callable[[Any], Lockstep] = Lockstep
    cluster: Cluster | None = None
    connections: Connections | None = None


class RemoteStateStrategy(Strategy, Closing):
    """Strategy with variables on parameter servers: a coordinator's, or one of its workers'.

    `limits=None` selects the default `CoordinatorOptions`.
    """

    executor: Lockstep

    def __init__(self, parts: ProcessParts, limits: CoordinatorOptions | None = None) -> None:
        super().__init__(parts.topology, placement=parts.placement, executor=parts.executor)
        self.limits = limits or CoordinatorOptions()
        self._cluster = parts.cluster
        self._connections = parts.connections

    @property
    def cluster(self) -> Cluster:
        """The running servers. Only in a process that started or joined them."""
        assert self._cluster is not None
        return self._cluster

    def __repr__(self) -> str:
        name = type(self).__name__
        if isinstance(self.executor, NonTraining):
            return f"{name} of other tasks than {self.executor.task}"
        if not self.executor.schedules:
            return f"{super().__repr__()} of a worker"
        return f"{name}({len(self.cluster.server_addresses)} servers)"

    def __deepcopy__(self, memo: dict[int, object]) -> NoReturn:
        raise copy_refused(self)

    def close(self) -> None:
        """Stops the workers and the servers, and discards the variables."""
        if self._connections is None:  # A coordinator's worker closes its connections itself.
            return
        with contextlib.ExitStack() as stack:
            stack.callback(self.cluster.close)
            stack.callback(self._connections.close)
            stack.callback(self.executor.close)
