"""Joining of an elastic group, and the variables of its present members."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from stratagem import config, logs
from stratagem.cluster.resolvers.resolver import ClusterResolver
from stratagem.devices.mesh import Topology
from stratagem.exit_codes import NOT_NEEDED
from stratagem.group.authentication.credentials import Credentials
from stratagem.group.current import set_current_group
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.group_messages import NotAdmittedError
from stratagem.group.verdict import GroupLimits
from stratagem.messages import explain
from stratagem.options import VariableAggregation
from stratagem.strategies.membership import identity_of
from stratagem.variables.components import store_components
from stratagem.variables.kind import VariableKind
from stratagem.variables.lost_components import components_of_members
from stratagem.variables.registry import Home, VariableRegistry, home_of

_logger = logging.getLogger(__name__)


def check_num_backup_workers(number: object, num_processes: int | None = None) -> None:
    """Raises TypeError unless it is an int, ValueError if it is out of range.

    `num_processes` is the number of processes, if it is known.
    """
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(
            explain(
                f"num_backup_workers={number!r} is of type {type(number).__name__}.",
                expected="an int.",
                fix="pass the number of workers that a step need not wait for, such as 1.",
            )
        )
    if number < 0 or (num_processes is not None and number >= num_processes):
        several = "" if num_processes is None else f" of {num_processes} workers"
        raise ValueError(
            explain(
                f"num_backup_workers={number}{several} is out of range.",
                expected="0 or more, and less than the number of workers.",
                fix="pass a smaller number: the others make each step.",
            )
        )


def join_elastic_group(
    resolver: ClusterResolver, *, num_backup_workers: int = 0, allow_unauthenticated: bool
) -> ElasticGroup:
    """Joins the group of a cluster.

    Raises ValueError if it has no addresses, uses TLS, or has too few workers. Ends this process if
    the group trains already, with backup workers: the launcher does not start it again then.
    """
    identity = identity_of(resolver, resolver.processes(), with_addresses=True)
    check_num_backup_workers(num_backup_workers, identity.num_processes)
    num_spares = config.num_spares()
    _check_spares(num_spares, identity.num_processes, num_backup_workers)
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
    try:
        group = ElasticGroup(
            identity,
            limits,
            credentials,
            num_backups=num_backup_workers,
            num_spares=num_spares,
            prepares=True,
        )
    except NotAdmittedError as error:
        logs.announce(_logger, str(error))
        raise SystemExit(NOT_NEEDED) from None
    joined: Any = group
    set_current_group(joined)
    return group


def _check_spares(num_spares: int, num_processes: int, num_backup_workers: int) -> None:
    if num_spares >= num_processes:
        raise ValueError(
            explain(
                f"STRATAGEM_NUM_SPARES is {num_spares}, but the cluster has "
                f"{num_processes} processes.",
                expected="at least one process that is no spare.",
                fix="add workers, or lower STRATAGEM_NUM_SPARES.",
            )
        )
    if num_spares and num_backup_workers:
        raise ValueError(
            explain(
                f"num_backup_workers is {num_backup_workers}, and STRATAGEM_NUM_SPARES is "
                f"{num_spares}.",
                expected="one of both: with backup workers no process joins later, since the "
                "members that are late would not know of it.",
                fix="start without --spares, or leave out num_backup_workers.",
            )
        )


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
