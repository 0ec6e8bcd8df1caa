"""Synchronous training with mirrored variables, and large ones kept elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from stratagem.cluster import ClusterResolver
from stratagem.messages import explain
from stratagem.partitioners import Partitioner
from stratagem.servers.closing import Closing
from stratagem.strategies.coordinator_options import CoordinatorOptions
from stratagem.strategies.cross_device_ops import CrossDeviceOps
from stratagem.strategies.local_topology import local_topology, parameter_device_of
from stratagem.strategies.placement_rules import (
    CENTRAL,
    SERVER,
    PlacementRules,
    places_with_replicas,
)
from stratagem.strategies.served_tables import (
    ServedTables,
    refuse_server_arguments,
    start_servers,
)
from stratagem.strategies.strategy import Strategy
from stratagem.topology.absent import refuse_to_plan
from stratagem.topology.devices import DeviceLike
from stratagem.variables import OnOneDevice

__all__ = ["HybridStrategy"]


@final
class HybridStrategy(Strategy, Closing):
    """Trains one model on several devices in lockstep, large variables of it kept by rules.

    What no rule matches is mirrored: a copy on each device. A "central" variable is kept once, on
    the parameter device, which updates it; a "sharded" one in parts on the replicas' devices; a
    "pinned_host" one in parts in the host's memory, as under `CentralStorageStrategy`; a "server"
    one by parameter servers, as under `ParameterServerStrategy`, which update it. Of a
    large table that layers look rows up in (`keras.layers.Embedding`, `sg.nn.embedding_lookup`)
    only these rows travel, and their gradients. What an optimizer keeps for a variable is where
    that is; its counter and its learning rate are here. The numbers are those of one device, but
    that averages of rows on servers stand still while nobody looks them up.

    With a "server" rule, leave it as a context manager, or call `close()`: the servers end then.

    Args:
        devices: as of `MirroredStrategy`.
        cross_device_ops: how gradients are combined; None lets the compiler choose.
        placement: "mirrored", "central", "sharded", "pinned_host" or "server" by rule. A rule is a
            regular expression, searched in the variable's path, or a function of the variable that
            tells whether it matches, as `sg.placement.at_least_bytes(2**30)`. The first match wins.
        parameter_device: where central variables are; None for the host.
        variable_partitioner: which variables on servers are split over several; None for none.
        cluster_resolver: tells the cluster of which this is the chief; None for that of
            `TF_CONFIG`, or else servers on this machine.
        num_servers: how many there are without a cluster; None for two.
        journal_dir: as of `ParameterServerStrategy`.
        options: limits of the servers, from `sg.coordinator.options`; None for its defaults.

    Raises:
        ValueError: devices as of `MirroredStrategy`; an unknown place, or devices without pinned
            memory; when training starts, a rule that is the first match of no variable; arguments
            for servers and no "server" rule, or a cluster without ps tasks or with workers.
        TypeError: an argument of another type.
        ImportError: with a "server" rule, Ray, pyzmq or cloudpickle is not installed.

    Example:
        >>> strategy = sg.HybridStrategy(["cpu:0", "cpu:1"], placement={"embedding": "sharded"})
        >>> with strategy.scope():
        ...     table = keras.layers.Embedding(100_000, 16)

    Source: tensorflow/tensorflow issues 27726 and 20651, which ask for it.
    """

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
        super().__init__(local_topology(devices, name="devices"), cross_device_ops)
        asked = [*placement.values()] if isinstance(placement, Mapping) else []
        has_central = CENTRAL in asked or parameter_device is not None
        places = {
            **places_with_replicas(placement, self.topology),
            CENTRAL: OnOneDevice(parameter_device_of(parameter_device)) if has_central else None,
            SERVER: None,
        }
        self.keeping = PlacementRules(placement, places)
        self._resolver = cluster_resolver
        self._tables: ServedTables | None = None
        if not self.keeping.need_servers:
            refuse_server_arguments(
                variable_partitioner=variable_partitioner,
                cluster_resolver=cluster_resolver,
                num_servers=num_servers,
                journal_dir=journal_dir,
                options=options,
            )
            return
        refuse_to_plan("A HybridStrategy with tables on parameter servers")
        self._tables = start_servers(
            self.num_replicas_in_sync,
            variable_partitioner,
            cluster_resolver,
            num_servers,
            journal_dir,
            options,
        )
        self.serving, self.exchange = self._tables.serving, self._tables.exchange

    def __repr__(self) -> str:
        told = f", {self._tables.num_servers} servers" if self._tables is not None else ""
        return f"{type(self).__name__}({self.topology}{told})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        if self._tables is None:
            return super().__deepcopy__(memo)
        raise ValueError(
            explain(
                f"{self} was given to copy.deepcopy.",
                expected="one strategy for its servers, which hold each variable once.",
                fix="use the strategy itself.",
            )
        )

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """What told the cluster of its servers; None if nothing did."""
        return self._resolver

    def close(self) -> None:
        """Ends the servers, with all that they hold; does nothing where there are none."""
        if self._tables is not None:
            self._tables.close()
