"""Parameter servers for large tables of a lockstep strategy in one process."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from stratagem.closing import Closing
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.abstract_devices import refuse_to_plan
from stratagem.messages import explain
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.lost_updates import LostUpdates
from stratagem.parameter_server.client.remote_steps import RemoteSteps
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.cluster.cluster_plan import Cluster, ClusterPlan
from stratagem.parameter_server.cluster.cluster_roles import checked_cluster
from stratagem.parameter_server.cluster.coordinator_options import (
    CoordinatorOptions,
    checked_options,
)
from stratagem.parameter_server.keras.server_keras import ServerKeras
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.server.updates import ASYNCHRONOUS
from stratagem.parameter_server.strategy.entry_points import start_cluster
from stratagem.parameter_server.strategy.process_parts import connect


class TableServers(Closing):
    """Parameter servers of a strategy whose other variables are local.

    The replicas are in lockstep and this process is the only client, so servers apply updates at
    once, as a single device would. `steps` runs steps and has the `variables`. Closing this closes
    `cluster`.
    """

    def __init__(
        self,
        cluster: Cluster,
        num_replicas: int,
        partitioner: Partitioner | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._cluster = cluster
        self._connections = connect(cluster, silence_s)
        cluster.report_moves_to(self._connections.move)
        self.num_servers = len(cluster.server_addresses)
        variables = VariableClient(
            ServerClient(self._connections),
            ShardPlacer(self.num_servers, partitioner),
            ASYNCHRONOUS,
            has_journals=cluster.has_journals,
            is_coordinator=True,
        )
        self.steps = RemoteSteps(variables, num_replicas, keras=ServerKeras(), is_alone=True)
        self.steps.lost_updates = LostUpdates()

    def close(self) -> None:
        """Stops the servers and discards their variables."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._cluster.close)
            stack.callback(self._connections.close)


def table_servers(
    num_replicas: int | None,
    *,
    variable_partitioner: Partitioner | None,
    cluster_resolver: ClusterResolver | None,
    num_servers: int | None,
    journal_dir: str | os.PathLike[str] | None,
    options: CoordinatorOptions | None,
) -> TableServers | None:
    """Starts the parameter servers of a strategy, on this machine or in a cluster.

    `num_replicas` is None if no variable is placed on servers: then other arguments raise a
    ValueError. They are documented, with their errors, in `HybridStrategy`.
    """
    arguments = {name: value for name, value in locals().items() if name != "num_replicas"}
    if num_replicas is None:
        _refuse(arguments)
        return None
    refuse_to_plan("A HybridStrategy with tables on parameter servers")
    limits = checked_options(options, independent=True)
    resolver, spec = checked_cluster(cluster_resolver, "HybridStrategy")
    plan = ClusterPlan.servers_only(spec, resolver.task_type, num_servers)
    plan = plan.with_journals(journal_dir, limits)
    silence_s = limits.recovery_timeout_s
    return TableServers(start_cluster(plan), num_replicas, variable_partitioner, silence_s)


def _refuse(arguments: dict[str, Any]) -> None:
    given = [f"{name}={value!r}" for name, value in arguments.items() if value is not None]
    if given:
        raise ValueError(
            explain(
                f"A HybridStrategy received {', '.join(given)}, but no rule has the place "
                '"server".',
                expected="arguments for parameter servers only if a rule uses them.",
                fix='pass placement={"embedding": "server"}, or omit these arguments.',
            )
        )
