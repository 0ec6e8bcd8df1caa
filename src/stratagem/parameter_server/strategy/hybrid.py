"""HybridStrategy: mirrored variables, and large ones stored by rules."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from stratagem.closing import Closing
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.devices import DeviceLike
from stratagem.messages import explain
from stratagem.parameter_server.cluster.coordinator_options import CoordinatorOptions
from stratagem.parameter_server.partitioners import Partitioner
from stratagem.parameter_server.strategy.table_servers import table_servers
from stratagem.strategies.base.cross_device_ops import CrossDeviceOps
from stratagem.strategies.base.recreate import recreatable
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.local_topology import local_topology, parameter_device_of
from stratagem.strategies.placement_rules import (
    CENTRAL,
    SERVER,
    PlacementRules,
    check_rules,
    places_on_replicas,
)
from stratagem.variables.single_device_store import SingleDeviceStore


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
