"""Parameter servers of a strategy whose replicas are devices of this process."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from stratagem.cluster import ClusterResolver
from stratagem.messages import explain
from stratagem.partitioners import Partitioner
from stratagem.servers import ASYNCHRONOUS, LostUpdates, Placer, ServedVariables
from stratagem.servers.closing import Closing
from stratagem.strategies.cluster_roles import checked_cluster
from stratagem.strategies.coordinator_options import CoordinatorOptions, checked_options
from stratagem.strategies.served_cluster import (
    Cluster,
    ClusterPlan,
    make_cluster,
)
from stratagem.strategies.served_steps import ServedSteps
from stratagem.strategies.served_worker import connected
from stratagem.strategies.serving import Serving

__all__ = ["ServedTables", "refuse_server_arguments", "start_servers"]


class ServedTables(Closing):
    """Variables of this process that servers hold; all others it has itself.

    Its replicas are in lockstep and nobody else changes anything, so that the servers apply what
    they get at once, as one device would.

    Args:
        cluster: its servers; closing this closes them.
        num_replicas: of this process.
        partitioner: which variables are split over servers; None for none.
        silence_s: how long a server may give no sign of life; None for the default.

    `serving` reads and changes variables, `exchange` runs steps.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_replicas: int,
        partitioner: Partitioner | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._connections = connected(cluster, silence_s)
        cluster.tell_moves_to(self._connections.move)
        self.num_servers = len(cluster.server_addresses)
        self.serving: Serving = Serving(
            ServedVariables(self._connections),
            Placer(self.num_servers, partitioner),
            ASYNCHRONOUS,
            has_journals=cluster.has_journals,
            is_coordinator=True,
        )
        self.exchange = ServedSteps(self.serving, num_replicas, is_alone=True)
        self.exchange.lost_updates = LostUpdates()

    def close(self) -> None:
        """Ends the servers, with all that they hold."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._cluster.close)
            stack.callback(self._connections.close)


def start_servers(
    num_replicas: int,
    partitioner: Partitioner | None,
    resolver: ClusterResolver | None,
    num_servers: int | None,
    journal_dir: str | os.PathLike[str] | None,
    options: CoordinatorOptions | None,
) -> ServedTables:
    """Starts the parameter servers of a strategy, on this machine or those of a cluster.

    Args:
        num_replicas: of this process.
        partitioner: which variables are split over servers; None for none.
        resolver: tells the cluster; None for that of `TF_CONFIG`.
        num_servers: how many there are without a cluster; None chooses.
        journal_dir: where they keep their journals; None for folders of this run.
        options: limits; None for the defaults.

    Raises:
        ValueError: a cluster without ps tasks or with workers, another task than its chief, a
            number below 1, or limits of scheduled functions.
        TypeError: an argument of another type.
    """
    limits = checked_options(options, independent=True)
    resolver, spec = checked_cluster(resolver, "HybridStrategy")
    plan = ClusterPlan.servers_only(spec, resolver.task_type, num_servers)
    plan = plan.keeping_journals(journal_dir, limits.journal_interval_s)
    return ServedTables(make_cluster(plan), num_replicas, partitioner, limits.recovery_timeout_s)


def refuse_server_arguments(**arguments: Any) -> None:
    """Raises where arguments for servers were given and no variable goes to servers.

    Args:
        **arguments: as they were given.

    Raises:
        ValueError: one that is not None.
    """
    given = {name: value for name, value in arguments.items() if value is not None}
    if given:
        raise ValueError(
            explain(
                f"A HybridStrategy received {', '.join(f'{n}={v!r}' for n, v in given.items())}, "
                'and no rule has the place "server".',
                expected="arguments for parameter servers where a rule sends variables there.",
                fix='write placement={"embedding": "server"}, or leave them out.',
            )
        )
