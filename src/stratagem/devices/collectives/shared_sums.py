"""Sums in shared memory as part of a compiled program.

A program starts them one after the other, since each has the outcome of the one before among its
arguments. XLA runs independent calls in any order, and two processes could otherwise add different
arrays. A sum outside such an order, as in a loop of the user's, is the compiler's own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, JaxprEqn, gensym

from stratagem.devices.collectives.axis import ReplicaAxis
from stratagem.devices.collectives.shared_memory import SharedArea, SumServer, is_supported
from stratagem.devices.collectives.xla_handler import PendingCall, handlers_work, register_handler
from stratagem.devices.mesh import REPLICA_AXIS, Topology
from stratagem.group.current import current_group
from stratagem.group.member import Group

_logger = logging.getLogger(__name__)
_TARGET = "stratagem_shared_sum"
_Sum = Callable[[jax.Array, ReplicaAxis], jax.Array]
SHARED_SUM = "_stratagem_shared_sum_over_replicas"


@dataclasses.dataclass
class _Membership:
    """The memory of this process, connected once: ids of the devices of all replicas."""

    is_decided: bool = False
    devices: tuple[int, ...] = ()


_membership = _Membership()
_servers: dict[int, SumServer] = {}


def connect_memory(topology: Topology) -> None:
    """Connects the processes of a machine if they can share memory; all must call it.

    Only the first topology of a process shares memory.
    """
    group = current_group()
    if group is None or not topology.spans_processes or topology.platform != "cpu":
        return
    if not _membership.is_decided:
        _membership.is_decided = True
        is_plain = topology.groups is None and topology.shard_size is None
        area = _connected_area(group, topology) if is_plain else None
        if area is not None:
            serve_sums(area, _local_ranks(topology), lambda: group.verdict is not None)
            _membership.devices = _ids_of(topology)


def is_connected(topology: Topology) -> bool:
    """Returns True if the replicas of a topology share memory."""
    is_plain = topology.shard_size is None
    return is_plain and bool(_membership.devices) and _membership.devices == _ids_of(topology)


def serve_sums(area: SharedArea, ranks: Sequence[int], is_lost: Callable[[], bool]) -> None:
    """Starts to serve the sums of the replicas of this process."""
    _servers.update({rank: SumServer(area, rank, is_lost) for rank in ranks})
    _register()


@functools.cache
def _register() -> None:
    register_handler(_TARGET, _start)


def _start(call: PendingCall) -> None:
    _servers[int(call.arguments[2][0])].start(_StartedSum(call))


def _ids_of(topology: Topology) -> tuple[int, ...]:
    return tuple(device.id for device in topology.devices or ())


def _local_ranks(topology: Topology) -> list[int]:
    own = jax.process_index()
    return [rank for rank, one in enumerate(topology.devices or ()) if one.process_index == own]


def _connected_area(group: Group, topology: Topology) -> SharedArea | None:
    """Returns the area that all processes opened, or None on all of them."""
    can_share = is_supported() and handlers_work()
    machines = group.exchange("machines that share memory", _machine() if can_share else None)
    if machines[0] is None or machines.count(machines[0]) < len(machines):
        return None
    count = topology.num_replicas
    area, error = _opened(count, None) if group.process_id == 0 else (None, "")
    [offer, *_] = group.exchange("shared memory", None if area is None else area.offer)
    if group.process_id > 0 and offer is not None:
        area, error = _opened(count, offer)
    errors = group.exchange("connections to shared memory", error)
    if any(errors):
        _logger.info("The processes of this machine do not share memory: %s.", errors)
        return None
    return area


def _machine() -> str | None:
    """Returns an identifier of this machine since it started, and of what it shows this process."""
    try:
        started = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{started} {os.readlink('/proc/self/ns/pid')} {os.geteuid()}"
    except OSError:
        return None


def _opened(num_replicas: int, offer: dict[str, Any] | None) -> tuple[SharedArea | None, str]:
    """Returns the area, or None and the reason."""
    try:
        return SharedArea(num_replicas, offer), ""
    except (OSError, ValueError) as error:  # such as where memory is short
        return None, str(error)


class _StartedSum:
    """A call of XLA's as a sum."""

    def __init__(self, call: PendingCall) -> None:
        self.addend, self.total = call.arguments[0], call.results[0]
        self.complete, self.fail = call.complete, call.fail


def no_sums() -> jax.Array:
    """Returns the outcome of no sums, with which an order begins."""
    return jnp.uint32(0)


def shared_sum(array: jax.Array, axis: ReplicaAxis, elsewhere: _Sum) -> jax.Array:
    """Returns the sum of a local array of one of `DTYPES` over replicas. Call in a compiled step.

    Until `in_order` replaces it, it is the sum of another algorithm.
    """
    return _stratagem_shared_sum_over_replicas(array, axis, elsewhere)


# Recognized by its name in the trace.
@functools.partial(jax.jit, static_argnums=(1, 2))
def _stratagem_shared_sum_over_replicas(
    array: jax.Array, axis: ReplicaAxis, elsewhere: _Sum
) -> jax.Array:
    return elsewhere(array, axis)


def ordered_sum(
    array: jax.Array, order: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum of a local array over replicas, and the outcome for the sum after it."""
    call = jax.ffi.ffi_call(
        _TARGET,
        (jax.ShapeDtypeStruct(array.shape, array.dtype), jax.ShapeDtypeStruct((), np.uint32)),
        # A total in place of the addend would be copied first where the addend is used again, or
        # is an argument of the program.
        input_output_aliases={1: 1},
    )
    total, order = call(array, order, jax.lax.axis_index(axis_name))
    return total, order


def in_order(closed: ClosedJaxpr) -> ClosedJaxpr | None:
    """Replaces the sums of a step by sums in shared memory; None if there are none.

    The result has the outcome of the sums before among its inputs and that of its own among its
    outputs, at the end of both. Sums inside of its equations, such as loops, stay the compiler's.
    """
    jaxpr = closed.jaxpr
    if not any(map(is_shared_sum, jaxpr.eqns)):
        return None
    new_variable: Any = gensym()
    number = ShapedArray((), np.dtype(np.uint32))
    first = order = new_variable(number)
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        if not is_shared_sum(eqn):
            eqns.append(eqn)
            continue
        addend = eqn.invars[0].aval
        [call] = _traced_sum(tuple(addend.shape), np.dtype(addend.dtype)).jaxpr.eqns
        after = new_variable(number)
        eqns.append(call.replace(invars=[eqn.invars[0], order], outvars=[eqn.outvars[0], after]))
        order = after
    ordered = jaxpr.replace(
        eqns=eqns, invars=[*jaxpr.invars, first], outvars=[*jaxpr.outvars, order]
    )
    return ClosedJaxpr(ordered, closed.consts)


def _traced_sum(shape: tuple[int, ...], dtype: np.dtype[Any]) -> ClosedJaxpr:
    # The number of replicas is not part of the trace.
    program = jax.jit(ordered_sum, static_argnums=2)
    trace = jax.make_jaxpr(program, static_argnums=2, axis_env=[(REPLICA_AXIS, 1)])
    return trace(jax.ShapeDtypeStruct(shape, dtype), no_sums(), REPLICA_AXIS)


def is_shared_sum(eqn: JaxprEqn) -> bool:
    """Returns True for a sum of one array; a derivative, which is a sum too, may add several."""
    return eqn.params.get("name") == SHARED_SUM and len(eqn.invars) == len(eqn.outvars) == 1
