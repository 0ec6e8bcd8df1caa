"""HybridStrategy: mirrored variables, and large ones stored by rules."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.finding import DeviceLike, refuse_to_plan
from stratagem.errors import explain
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.lost_updates import LostUpdates
from stratagem.parameter_server.client.remote_steps import RemoteSteps
from stratagem.parameter_server.client.shard_layout import ShardPlacer
from stratagem.parameter_server.client.variable_client import VariableClient
from stratagem.parameter_server.cluster.cluster_plan import (
    Cluster,
    ClusterPlan,
    CoordinatorOptions,
    checked_cluster,
    checked_options,
)
from stratagem.parameter_server.keras.server_keras import ServerKeras
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.server.updates import ASYNCHRONOUS
from stratagem.parameter_server.strategy.entry_points import start_cluster
from stratagem.parameter_server.strategy.process_parts import connect
from stratagem.resources import Closing
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.membership import local_topology, parameter_device_of
from stratagem.strategies.placement import (
    CENTRAL,
    SERVER,
    PlacementRules,
    check_rules,
    places_on_replicas,
)
from stratagem.strategies.strategy import Strategy, recreatable
from stratagem.variables.placement import SingleDeviceStore

# Parameter servers for large tables of a lockstep strategy in one process.


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


@final
class HybridStrategy(Strategy, Closing):
    """Trains one model on several devices in lockstep, and stores large variables by rules.

    A variable that no rule matches is mirrored: each device has a copy. A "central" variable is
    stored once, on the parameter device, which updates it; a "sharded" one is sharded over the
    replicas' devices; a "pinned_host" one is sharded over pinned host memory, as under
    `CentralStorageStrategy`; a "server" one is on parameter servers, which update it, as under
    `ParameterServerStrategy`. Optimizer slots are stored with their variable, and the optimizer's
    counter and learning rate in this process. Layers that look up rows of a large table
    (`keras.layers.Embedding`, `sg.nn.embedding_lookup`) move only these rows and their gradients.
    Results match a single device, except that slots of rows on servers decay only in steps that
    look the rows up.

    With a "server" rule, use it as a context manager or call `close()`, which ends the servers.

    Args:
        devices: as for `MirroredStrategy`.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        placement: "mirrored", "central", "sharded", "pinned_host" or "server" by rule. A rule is a
            regular expression, searched in the variable's path, or a predicate of the variable,
            such as `sg.placement.at_least_bytes(2**30)`. The first match wins.
        parameter_device: device of central variables; None for the host.
        variable_partitioner: splits variables over several servers; None for no splitting.
        cluster_resolver: the cluster, with this process as its chief; None for `TF_CONFIG`, or else
            servers on this machine.
        num_servers: number of servers without a cluster; None for two.
        journal_dir: as for `ParameterServerStrategy`.
        options: limits of the servers, from `sg.coordinator.options`; None for its defaults.

    Raises:
        ValueError: devices as for `MirroredStrategy`; an unknown place, or devices without pinned
            host memory; when training starts, a rule that is the first match of no variable;
            arguments for servers without a "server" rule, or a cluster without ps tasks or with
            workers.
        TypeError: an argument of another type.
        ImportError: with a "server" rule, Ray, pyzmq or cloudpickle is not installed.

    Example:
        >>> strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embedding": "sharded"})
        >>> with strategy.scope():
        ...     table = keras.layers.Embedding(100_000, 16)

    Source: tensorflow/tensorflow issues 27726 and 20651, which ask for it.
    """

    @recreatable
    def __init__(
        self,
        devices: Sequence[DeviceLike] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        *,
        placement: Mapping[str | Callable[[Any], bool], str],
        parameter_device: DeviceLike | None = None,
        variable_partitioner: Partitioner | None = None,
        cluster_resolver: ClusterResolver | None = None,
        num_servers: int | None = None,
        journal_dir: str | os.PathLike[str] | None = None,
        options: CoordinatorOptions | None = None,
    ) -> None:
        topology = local_topology(devices, name="devices")
        requested = [*placement.values()] if isinstance(placement, Mapping) else []
        has_central = CENTRAL in requested or parameter_device is not None
        central = SingleDeviceStore(parameter_device_of(parameter_device)) if has_central else None
        places = {**places_on_replicas(placement, topology), CENTRAL: central, SERVER: None}
        check_rules(placement, places)  # before servers start
        self._resolver = cluster_resolver
        self._servers = table_servers(
            topology.num_replicas if SERVER in requested else None,
            variable_partitioner=variable_partitioner,
            cluster_resolver=cluster_resolver,
            num_servers=num_servers,
            journal_dir=journal_dir,
            options=options,
        )
        steps = None if self._servers is None else self._servers.steps
        rules = PlacementRules(placement, places, steps)
        super().__init__(topology, cross_device_ops, placement=rules)

    def __repr__(self) -> str:
        servers = f", {self._servers.num_servers} servers" if self._servers is not None else ""
        return f"{type(self).__name__}({self.topology}{servers})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self._servers is None:
            return super().__deepcopy__(memo)
        raise ValueError(
            explain(
                f"{self} was passed to copy.deepcopy, which cannot copy it.",
                expected="one strategy for its servers, which hold each variable once.",
                fix="use the strategy itself.",
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The resolver of the servers' cluster; None without one."""
        return self._resolver

    def close(self) -> None:
        """Ends the servers and discards their variables; does nothing without servers."""
        if self._servers is not None:
            self._servers.close()
