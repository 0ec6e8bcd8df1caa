"""What a ParameterServerStrategy needs of a cluster; `stratagem.coordinator` fills the slot."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol

from stratagem.cluster import ClusterSpec, id_in_cluster, worker_count
from stratagem.messages import explain
from stratagem.servers import ClusterKeys, UpdateMode
from stratagem.strategies.cluster_roles import check_counts

__all__ = [
    "Cluster",
    "ClusterPlan",
    "Processes",
    "make_cluster",
    "set_cluster_maker",
    "update_mode",
]

_LOCAL_WORKERS = 2
_LOCAL_SERVERS = 2


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """How many processes there are, and on which machines.

    Args:
        num_workers: how many workers.
        num_servers: how many parameter servers.
        spec: the machine of each task; None for this one.
        journal_dir: where servers keep their journals; None for folders of this run.
        journal_interval_s: how long they wait after each entry.
        task: type and index of this process where each worker runs a program of its own; None
            where this one coordinates them.
        strategy: whose it is, for messages.
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
        """Returns the plan of a cluster on this machine.

        Args:
            num_workers: how many workers; None chooses.
            num_servers: how many parameter servers; None chooses.

        Raises:
            ValueError: a number below 1.
        """
        return cls(
            _LOCAL_WORKERS if num_workers is None else num_workers,
            _LOCAL_SERVERS if num_servers is None else num_servers,
        )

    @classmethod
    def of(cls, spec: ClusterSpec, task_type: str | None) -> ClusterPlan:
        """Returns the plan of a cluster that somebody has described.

        Args:
            spec: its tasks.
            task_type: of this process.

        Raises:
            ValueError: no server or no worker in it, or this is not its coordinator.
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
        """Returns the plan of a cluster whose workers each run a program of their own.

        Args:
            spec: its tasks.
            task: type and index of this process.

        Raises:
            ValueError: no cluster, no server in it, or this is none of its workers.
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
        id_in_cluster(spec, task_type, index)  # refuses a task that is not there
        return cls(worker_count(spec, task_type), num_servers, spec, task=(task_type, index))

    @classmethod
    def servers_only(
        cls, spec: ClusterSpec, task_type: str | None, num_servers: int | None
    ) -> ClusterPlan:
        """Returns the plan of servers whose only client is this process.

        Args:
            spec: the tasks of a cluster that somebody has described; none for this machine.
            task_type: of this process.
            num_servers: how many servers there are on this machine; None chooses.

        Raises:
            ValueError: a cluster of other tasks than a chief and ps, a number of servers besides,
                another task than the chief, or a number below 1.
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
        """Returns the plan with another place for journals.

        Args:
            journal_dir: where servers keep them; None for folders of this run.
            journal_interval_s: how long they wait after each entry.
        """
        folder = None if journal_dir is None else os.fspath(journal_dir)
        return dataclasses.replace(self, journal_dir=folder, journal_interval_s=journal_interval_s)


class Processes(Protocol):
    """Processes of one kind, each with an address."""

    @property
    def addresses(self) -> list[str]:
        """Theirs, in their order."""
        ...

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Starts processes again that die.

        Args:
            on_lost: called with the index of one that has died, and why.
            on_returned: called with its index, and its new address.
            on_given_up: called with its index when it is not started any more, and why.
        """
        ...

    def close(self) -> None:
        """Ends them."""
        ...


class Cluster(Protocol):
    """Servers that run, and workers that can be started."""

    @property
    def keys(self) -> ClusterKeys:
        """Those of the cluster."""
        ...

    @property
    def server_addresses(self) -> list[str]:
        """Where the servers are, in their order."""
        ...

    @property
    def has_journals(self) -> bool:
        """Whether servers keep journals, from which they can be started again."""
        ...

    def locate_server(self, server: int) -> str | None:
        """Returns where a server is now, one that was started again too; None if not known."""
        ...

    def tell_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Has a function called with the index and the new address of a server that has moved."""
        ...

    def start_workers(self, serve: Callable[..., Any]) -> Processes:
        """Starts the workers.

        Args:
            serve: called in each with its index and the keys; returns what has an address.
        """
        ...

    def close(self) -> None:
        """Ends the servers."""
        ...


class _Slot:
    make: Callable[[ClusterPlan], Cluster] | None = None


def set_cluster_maker(make: Callable[[ClusterPlan], Cluster]) -> None:
    """Fills the slot.

    Args:
        make: starts a cluster.
    """
    _Slot.make = make


def make_cluster(plan: ClusterPlan) -> Cluster:
    """Starts the servers of a cluster.

    Args:
        plan: how many processes there are, and where.
    """
    assert _Slot.make is not None
    return _Slot.make(plan)


def update_mode(
    num_workers: int, *, synchronous: bool, backup_workers: int, max_staleness: int | None
) -> UpdateMode:
    """Returns when servers apply gradients.

    Args:
        num_workers: how many there are.
        synchronous: whether workers wait for each other.
        backup_workers: how many of them an update does not wait for.
        max_staleness: how many updates old the values may be that gradients were computed from.

    Raises:
        ValueError: numbers that make no sense together.
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
