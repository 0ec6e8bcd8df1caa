"""Joining of an elastic group, and the variables of its present members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem import config
from stratagem.authentication import Credentials
from stratagem.cluster import ClusterResolver
from stratagem.elastic import ElasticGroup
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.process_group import GroupLimits, set_current_group
from stratagem.strategies.membership import identity_of
from stratagem.topology import Topology
from stratagem.variables import (
    Home,
    VariableKind,
    VariableRegistry,
    components_of_members,
    home_of,
    store_components,
)

__all__ = ["check_constant_batch", "join_elastic_group", "move_variables"]


def join_elastic_group(resolver: ClusterResolver, *, allow_unauthenticated: bool) -> ElasticGroup:
    """Joins the group of a cluster; raises ValueError if it has no addresses, or uses TLS."""
    identity = identity_of(resolver, resolver.processes(), with_addresses=True)
    num_spares = config.num_spares()
    if num_spares >= identity.num_processes:
        raise ValueError(
            explain(
                f"STRATAGEM_NUM_SPARES is {num_spares}, but the cluster has "
                f"{identity.num_processes} processes.",
                expected="at least one process that is no spare.",
                fix="add workers, or lower STRATAGEM_NUM_SPARES.",
            )
        )
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
    group = ElasticGroup(identity, limits, credentials, num_spares=num_spares, prepares=True)
    joined: Any = group
    set_current_group(joined)
    return group


def check_constant_batch(constant_batch: object) -> None:
    """Raises ValueError for another value than "global" and "worker"."""
    if constant_batch not in ("global", "worker"):
        raise ValueError(
            explain(
                f"constant_batch={constant_batch!r} was passed.",
                expected='"global" or "worker".',
                fix='use "worker" if the memory of a worker has no room for more rows.',
            )
        )


def move_variables(variables: VariableRegistry, before: Topology, after: Topology) -> None:
    """Moves variables to the present members, this process among them before and after."""
    places = [_process_of(device) for device in before.devices or ()]
    members = [_process_of(device) for device in after.devices or ()]
    kept = [places.index(one) if one in places else None for one in members]
    own = members.index(jax.process_index())
    moved: list[Any] = variables.live()
    for variable in moved:
        home = home_of(variable)
        if not variable.has_value:
            continue
        if home is not None and home.kind is VariableKind.ON_READ:
            store_components(variable, _components(variable, home, kept, own), after)
        else:
            variable.stored = after.replicate(variable.stored.addressable_data(0))


def _process_of(device: jax.Device) -> int:
    return device.process_index


def _components(
    variable: Any, home: Home, kept: Sequence[int | None], own: int
) -> np.ndarray[Any, Any]:
    if variable.whole.storage is variable.stored:
        gathered = np.asarray(variable.whole.gathered)
        return components_of_members(gathered, home.aggregation, kept)
    # An initial value, of which each process knows its own component.
    value = variable.stored.addressable_data(0)[0]
    if home.aggregation is not VariableAggregation.SUM:
        return np.broadcast_to(value, (len(kept), *variable.shape))
    rows = np.zeros((len(kept), *variable.shape), variable.dtype)
    rows[own] = value
    return rows
