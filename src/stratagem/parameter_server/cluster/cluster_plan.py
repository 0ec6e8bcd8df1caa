"""Clusters of parameter servers: plans and interfaces."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol

from stratagem.cluster import ClusterSpec, id_in_cluster, worker_count
from stratagem.messages import explain
from stratagem.parameter_server.cluster.cluster_roles import check_counts
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.transport.keys import ClusterKeys

__all__ = [
    "Cluster",
    "ClusterPlan",
    "EntryPoints",
    "Processes",
    "update_mode",
]

_LOCAL_WORKERS = 2
_LOCAL_SERVERS = 2


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """Number of processes, and their machines.

    Args:
        num_workers: number of workers.
        num_servers: number of parameter servers.
        spec: the machine of each task; None for this one.
        journal_dir: folder of the servers' journals; None for folders of this run.
        journal_interval_s: seconds between entries of a journal.
        task: type and index of this process if each worker runs its own program; None if this
            process coordinates them.
        strategy: name of the strategy, for messages.
    """

    num_workers: int
    num_servers: int
    spec: ClusterSpec | None = None
    journal_dir: str | None = None
    journal_interval_s: float = 1.0
    task: tuple[str, int] | None = None
    strategy: str = "ParameterServerStrategy"

    def __post_init__(self) -> None:
        has_workers = self.strategy == "ParameterServerStrategy"
        for name in ("num_workers", "num_servers") if has_workers else ("num_servers",):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ValueError(
                    explain(
                        f"{self.strategy} received {name}={number!r}.",
                        expected="at least 1.",
                        fix=f"leave {name} out.",
                    )
                )

    @classmethod
    def local(cls, num_workers: int | None, num_servers: int | None) -> ClusterPlan:
        """Returns the plan of a cluster on this machine; None chooses a number.

        Raises:
            ValueError: a number below 1.
        """
        return cls(
            _LOCAL_WORKERS if num_workers is None else num_workers,
            _LOCAL_SERVERS if num_servers is None else num_servers,
        )

    @classmethod
    def of(cls, spec: ClusterSpec, task_type: str | None) -> ClusterPlan:
        """Returns the plan of a cluster with a coordinator, from its spec.

        Raises:
            ValueError: the cluster has no server or no worker, or this is not its coordinator.
        """
        check_counts(spec)
        if task_type not in (None, "", "chief"):
            raise ValueError(
                explain(
                    f"A ParameterServerStrategy was made in a task of type {task_type!r}.",
                    expected="the chief, which is the coordinator; the other tasks serve it.",
                    fix="run `stratagem server` in them, or sg.run_standard_server().join().",
                )
            )
        return cls(spec.num_tasks("worker"), spec.num_tasks("ps"), spec)

    @classmethod
    def independent(cls, spec: ClusterSpec, task: tuple[str | None, int | None]) -> ClusterPlan:
        """Returns the plan of a cluster whose workers each run their own program.

        `task` is the type and index of this process.

        Raises:
            ValueError: no cluster, no server in it, or this is not one of its workers.
        """
        task_type, index = task
        num_servers = spec.num_tasks("ps") if "ps" in spec.jobs else 0
        if task_type not in ("chief", "worker") or index is None or not num_servers:
            raise ValueError(
                explain(
                    f"independent=True in task {task!r} of a cluster with {num_servers} ps tasks.",
                    expected="the chief or a worker, and at least one ps task.",
                    fix='name both in TF_CONFIG: {"cluster": {"worker": [...], "ps": [...]}, '
                    '"task": {"type": "worker", "index": 0}}; run `stratagem server` as ps.',
                )
            )
        id_in_cluster(spec, task_type, index)  # raises for an unknown task
        return cls(worker_count(spec, task_type), num_servers, spec, task=(task_type, index))

    @classmethod
    def servers_only(
        cls, spec: ClusterSpec, task_type: str | None, num_servers: int | None
    ) -> ClusterPlan:
        """Returns the plan of servers with this process as their only client.

        Args:
            spec: tasks of the user's cluster; empty for this machine.
            task_type: type of this process.
            num_servers: number of servers on this machine; None chooses.

        Raises:
            ValueError: a cluster of other tasks than a chief and ps, a cluster together with a
                number of servers, another task than the chief, or a number below 1.
        """
        if not spec:
            count = _LOCAL_SERVERS if num_servers is None else num_servers
            return cls(0, count, strategy="HybridStrategy")
        if {"chief", "ps"} - {*spec.jobs} or "worker" in spec.jobs or task_type != "chief":
            raise ValueError(
                explain(
                    f"A HybridStrategy was made in a task of type {task_type!r} of a cluster with "
                    f"the tasks {sorted(spec.jobs)}.",
                    expected="the chief of a cluster with ps tasks and no workers: its replicas "
                    "are devices of this process.",
                    fix='set TF_CONFIG to {"cluster": {"chief": [...], "ps": [...]}, "task": '
                    '{"type": "chief", "index": 0}}; run `stratagem server` as ps.',
                )
            )
        if num_servers is not None:
            raise ValueError(
                explain(
                    f"num_servers={num_servers!r} was given beside a cluster with "
                    f"{spec.num_tasks('ps')} ps tasks.",
                    expected="a number of servers where there is no cluster.",
                    fix="leave num_servers out.",
                )
            )
        return cls(0, spec.num_tasks("ps"), spec, strategy="HybridStrategy")

    def keeping_journals(
        self, journal_dir: str | os.PathLike[str] | None, journal_interval_s: float
    ) -> ClusterPlan:
        """Returns the plan with another journal folder; None for folders of this run."""
        folder = None if journal_dir is None else os.fspath(journal_dir)
        return dataclasses.replace(self, journal_dir=folder, journal_interval_s=journal_interval_s)


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """Functions that start the object that a process of the cluster serves; it has an address.

    Args:
        server: called with the index, the keys, the journal's folder and its interval in seconds.
        worker: called with the index and the keys.
    """

    server: Callable[..., Any]
    worker: Callable[..., Any]


class Processes(Protocol):
    """Processes of one kind, each with an address."""

    @property
    def addresses(self) -> list[str]:
        """Their addresses, in order."""
        ...

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Restarts processes that die.

        Args:
            on_lost: called with the index of a dead process, and the reason.
            on_returned: called with its index, and its new address.
            on_given_up: called with its index and the error when it is no longer restarted.
        """
        ...

    def close(self) -> None:
        """Ends the processes."""
        ...


class Cluster(Protocol):
    """Running servers, and workers to start."""

    @property
    def keys(self) -> ClusterKeys:
        """The keys of the cluster."""
        ...

    @property
    def server_addresses(self) -> list[str]:
        """Addresses of the servers, in order."""
        ...

    @property
    def has_journals(self) -> bool:
        """True if servers keep journals, from which they can be restarted."""
        ...

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        ...

    def tell_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Registers a function to call with the index and new address of a server that moved."""
        ...

    def start_workers(self) -> Processes:
        """Starts the workers."""
        ...

    def close(self) -> None:
        """Ends the servers."""
        ...


def update_mode(
    num_workers: int, *, synchronous: bool, backup_workers: int, max_staleness: int | None
) -> UpdateMode:
    """Returns the mode in which servers apply gradients.

    Args:
        num_workers: number of workers.
        synchronous: True if workers wait for each other.
        backup_workers: number of workers that an update does not wait for.
        max_staleness: limit on the age, in updates, of the values that gradients are computed from.

    Raises:
        ValueError: inconsistent numbers.
    """
    is_count = isinstance(backup_workers, int) and not isinstance(backup_workers, bool)
    if not is_count or not 0 <= backup_workers < num_workers:
        raise ValueError(
            explain(
                f"backup_workers={backup_workers!r} of {num_workers} workers.",
                expected="a number from 0 to one less than there are workers.",
                fix="leave backup_workers out.",
            )
        )
    if backup_workers and not synchronous:
        raise ValueError(
            explain(
                f"backup_workers={backup_workers} without synchronous=True.",
                expected="backup workers where workers wait for each other.",
                fix="pass synchronous=True, or leave backup_workers out.",
            )
        )
    return UpdateMode(num_workers - backup_workers if synchronous else 0, max_staleness)
