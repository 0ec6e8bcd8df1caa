"""Plans of parameter-server clusters, and interfaces of a running one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, Protocol

from stratagem.cluster.roles import id_in_cluster, worker_count
from stratagem.cluster.spec import ClusterSpec
from stratagem.devices.local_updates import LocalUpdates
from stratagem.folders import checked_folder
from stratagem.group.transport.keys import ClusterKeys
from stratagem.messages import explain
from stratagem.parameter_server.cluster.cluster_roles import check_counts, refuse_numbers
from stratagem.parameter_server.cluster.coordinator_options import CoordinatorOptions
from stratagem.parameter_server.cluster.round_settings import refuse_for_rounds, rounds_of
from stratagem.parameter_server.server.updates import UpdateMode

_LOCAL_WORKERS = 2
_LOCAL_SERVERS = 2


@dataclasses.dataclass(frozen=True)
class ClusterPlan:
    """Number and machines of a cluster's processes.

    `spec` has the machine of each task; None means this machine. `journal_dir=None` selects a
    folder of this run. `task` is the type and index of this process if each worker runs its own
    program, None in a coordinator. `strategy` is a name for messages.
    """

    num_workers: int
    num_servers: int
    spec: ClusterSpec | None = None
    journal_dir: str | None = None
    journal_interval_s: float = 1.0
    durable_updates: bool = False
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
                        expected="an integer of at least 1.",
                        fix=f"pass a positive integer, or omit {name} for the default.",
                    )
                )

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
            raise ValueError(
                explain(
                    f"A ParameterServerStrategy was created in a task of type {task_type!r}.",
                    expected="the chief, which coordinates the other tasks.",
                    fix="run `stratagem server` or sg.run_standard_server().join() in this task.",
                    code="SG511",
                )
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
            raise ValueError(
                explain(
                    f"independent=True was used in task {task!r} of a cluster with {num_servers} "
                    "ps tasks.",
                    expected="the chief or a worker of a cluster with at least one ps task.",
                    fix='list both in TF_CONFIG: {"cluster": {"worker": [...], "ps": [...]}, '
                    '"task": {"type": "worker", "index": 0}}; run `stratagem server` as ps.',
                    code="SG511",
                )
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
            raise ValueError(
                explain(
                    f"A HybridStrategy was created in a task of type {task_type!r} of a cluster "
                    f"with the jobs {sorted(spec.jobs)}.",
                    expected="the chief of a cluster with ps tasks and no workers: its replicas "
                    "are devices of this process.",
                    fix='set TF_CONFIG to {"cluster": {"chief": [...], "ps": [...]}, "task": '
                    '{"type": "chief", "index": 0}}; run `stratagem server` as ps.',
                    code="SG511",
                )
            )
        refuse_numbers(spec, num_servers=num_servers)
        return cls(0, spec.num_tasks("ps"), spec, strategy="HybridStrategy")

    def with_journals(
        self, journal_dir: str | os.PathLike[str] | None, limits: CoordinatorOptions
    ) -> ClusterPlan:
        """Returns the plan with another journal folder; None for a folder of this run."""
        return dataclasses.replace(
            self,
            journal_dir=None if journal_dir is None else checked_folder("journal_dir", journal_dir),
            journal_interval_s=limits.journal_interval_s,
            durable_updates=limits.durable_updates,
        )


@dataclasses.dataclass(frozen=True)
class JournalPlan:
    """Journals of a cluster's servers: the folder, and seconds between entries.

    `is_durable` answers an update only once it is on disk. `is_temporary` removes a journal when
    its server closes.
    """

    folder: str
    interval_s: float = 1.0
    is_durable: bool = False
    is_temporary: bool = False


@dataclasses.dataclass(frozen=True)
class EntryPoints:
    """Functions that start the object served by a process; the object has an `address`.

    `server` takes the index, the keys and a `JournalPlan`; `worker` takes the index and the keys.
    """

    server: Callable[..., Any]
    worker: Callable[..., Any]


class ClusterProcesses(Protocol):
    """Processes of one kind, such as all workers."""

    @property
    def addresses(self) -> list[str]:
        """Addresses, by index of the process."""
        ...

    def watch(
        self,
        on_lost: Callable[[int, str], None],
        on_returned: Callable[[int, str], None],
        on_given_up: Callable[[int, Exception], None],
    ) -> None:
        """Restarts processes that die.

        The callbacks get the index of the process, and: the reason of a loss, the new address after
        a restart, or the error once restarts are given up.
        """
        ...

    def close(self) -> None:
        """Stops the processes."""
        ...


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

    @property
    def has_journals(self) -> bool:
        """True if servers write journals, so that they can restart."""
        ...

    def locate_server(self, server: int) -> str | None:
        """Returns the current address of a server, also after a restart; None if unknown."""
        ...

    def report_moves_to(self, on_moved: Callable[[int, str], None]) -> None:
        """Registers a function to call with the index and new address of a restarted server."""
        ...

    def start_workers(self) -> ClusterProcesses:
        """Starts the workers."""
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
    local_updates: LocalUpdates | None = None,
) -> UpdateMode:
    """Returns the mode in which servers apply gradients; raises a ValueError for invalid counts.

    A synchronous update does not wait for `backup_workers` of the workers. `max_staleness` limits
    the age, in updates, of the values that gradients are computed from. With `local_updates`,
    workers push changes of weights; those that parameter servers cannot apply are refused.
    """
    is_count = isinstance(backup_workers, int) and not isinstance(backup_workers, bool)
    if not is_count or not 0 <= backup_workers < num_workers:
        raise ValueError(
            explain(
                f"backup_workers={backup_workers!r} was passed for {num_workers} workers.",
                expected="an integer from 0 to the number of workers minus 1.",
                fix="pass a smaller number, or omit backup_workers.",
            )
        )
    if backup_workers and not synchronous:
        raise ValueError(
            explain(
                f"backup_workers={backup_workers} was passed without synchronous=True.",
                expected="backup workers only for synchronous updates.",
                fix="pass synchronous=True, or omit backup_workers.",
            )
        )
    rounds = None
    if local_updates is not None:
        refuse_for_rounds(backup_workers=backup_workers, max_staleness=max_staleness)
        rounds = rounds_of(local_updates, num_workers, synchronous=synchronous)
    return UpdateMode(num_workers - backup_workers if synchronous else 0, max_staleness, rounds)
