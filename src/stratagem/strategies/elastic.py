"""Mirrored variables in processes that go on without those that are lost."""

from __future__ import annotations

from typing import Any, NoReturn, final

import jax
import numpy as np

from stratagem import config
from stratagem.authentication import Credentials
from stratagem.cluster import ClusterResolver, TFConfigClusterResolver, detect
from stratagem.collectives.elastic_rounds import serve_rounds
from stratagem.communication import CommunicationOptions
from stratagem.elastic import ElasticGroup, View
from stratagem.execution import ElasticLockstep, Lockstep
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.process_group import GroupLimits, agree_on_random_state, set_current_group
from stratagem.strategies.base.automatic import AutomaticOps
from stratagem.strategies.base.recreate import recreatable
from stratagem.strategies.base.strategy import Strategy
from stratagem.strategies.local_topology import local_topology
from stratagem.strategies.membership import check_resolver, copy_refused, identity_of
from stratagem.topology import Topology, start_separately
from stratagem.variables import VariableKind, components_of_members, home_of, store_components

__all__ = ["ElasticStrategy"]


@final
class ElasticStrategy(Strategy):
    """Trains one model in several processes in lockstep, which go on if some of them are lost.

    Each process has one CPU device and a copy of the model. If a process dies, no variable has
    changed by the step that it broke. The others split the same batch among themselves, and run the
    step again: in the same processes, from the weights that they have. So the global batch stays as
    it is, and the weights are those of an uninterrupted run with these members in each step.

    All processes read the same data, and each uses its rows. Metrics count what a lost process has
    counted.

    Args:
        cluster_resolver: the cluster and this process's task; None reads the environment. It lists
            the address of every process.
        allow_unauthenticated: as for `MultiWorkerMirroredStrategy`.

    Raises:
        ValueError: an invalid cluster, a task that does not train, several hosts without a secret.
        TypeError: an argument of another type.
        DeadlineExceededError: not all processes came in time; the message names the missing ones.
        RuntimeError: JAX has started already, or a process has several devices.

    Example:
        >>> strategy = sg.ElasticStrategy()  # no cluster: one device
        >>> strategy.num_replicas_in_sync
        1

    Source: Birman and Joseph, Exploiting virtual synchrony in distributed systems, 1987; PyTorch,
    torchft.
    """

    @recreatable
    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        allow_unauthenticated: bool = False,
    ) -> None:
        check_resolver(cluster_resolver, "cluster_resolver")
        self._resolver = cluster_resolver or detect() or TFConfigClusterResolver()
        processes = self._resolver.processes()
        self._group: ElasticGroup | None = None
        self._devices: tuple[jax.Device, ...] = ()
        if processes.num_processes == 1:
            topology = local_topology(["cpu:0"], name="devices")
            super().__init__(topology, executor=Lockstep)
            return
        group = self._group = _joined(self._resolver, allow_unauthenticated=allow_unauthenticated)
        self._devices = start_separately(processes.num_processes, processes.process_id)
        serve_rounds(group)
        super().__init__(
            self._topology_of(group.view),
            AutomaticOps(CommunicationOptions()),
            executor=ElasticLockstep,
        )
        group.listen(self._continue)
        agree_on_random_state()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise copy_refused(self)

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The resolver of the cluster."""
        return self._resolver

    @property
    def members(self) -> tuple[int, ...]:
        """Ids of the processes that train, in replica order.

        Example:
            >>> sg.ElasticStrategy().members
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.view.members

    @property
    def participants(self) -> tuple[int, ...]:
        """Ids of the processes whose values the last step has combined, in replica order.

        A process that is lost at the end of a step may have taken part in it.

        Example:
            >>> sg.ElasticStrategy().participants
            (0,)

        Source: specific to Stratagem.
        """
        return (0,) if self._group is None else self._group.participants

    def _topology_of(self, view: View) -> Topology:
        return Topology(tuple(self._devices[member] for member in view.members))

    def _continue(self, view: View) -> None:
        """Continues with the members of a view, and the values that this process has."""
        before = [device.process_index for device in self.topology.devices or ()]
        self.topology = self._topology_of(view)
        kept = [before.index(member) for member in view.members]
        for variable in self.variables.live():
            if not variable.has_value:
                continue
            home = home_of(variable)
            if home is not None and home.kind is VariableKind.ON_READ:
                rows = _components(variable, home.aggregation, kept, before.index(self._own))
                store_components(variable, rows, self.topology)
            else:
                variable.stored = self.topology.replicate(variable.stored.addressable_data(0))

    @property
    def _own(self) -> int:
        return jax.process_index()


def _components(
    variable: Any, aggregation: VariableAggregation, kept: list[int], own: int
) -> np.ndarray[Any, Any]:
    if variable.whole.storage is variable.stored:
        components = np.asarray(variable.whole.gathered)
        return components_of_members(components, aggregation, kept)
    # Written by a program that committed nothing since: only this process's is known.
    rows = np.zeros((len(kept), *variable.shape), variable.dtype)
    rows[kept.index(own)] = variable.stored.addressable_data(0)[0]
    return rows


def _joined(resolver: ClusterResolver, *, allow_unauthenticated: bool) -> ElasticGroup:
    identity = identity_of(resolver, resolver.processes(), with_addresses=True)
    credentials = Credentials.find(
        identity.label, identity.hosts, allow_unauthenticated=allow_unauthenticated
    )
    if credentials.certificates is not None:
        raise ValueError(
            explain(
                "STRATAGEM_TLS_DIR is set.",
                expected="no TLS: members of an ElasticStrategy exchange gradients in plain text.",
                fix="unset it on a network that only the processes can reach, or use "
                "MultiWorkerMirroredStrategy.",
            )
        )
    limits = GroupLimits(
        join_s=config.join_timeout_s(),
        peer_s=config.peer_timeout_s(),
        stuck_s=config.stuck_timeout_s(),
        barrier_s=config.barrier_timeout_s(),
    )
    group = ElasticGroup(identity, limits, credentials)
    joined: Any = group
    set_current_group(joined)
    return group
