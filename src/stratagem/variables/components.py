"""Values of several replicas or processes: components of ON_READ variables, initial values.

Process 0's initial values go to all processes; each replica has its component of a variable that is
aggregated when it is read.
"""

from __future__ import annotations

import gc
import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology, start_lock
from stratagem.devices.shards import local_copy
from stratagem.errors import explain, invalid
from stratagem.group.current import current_group
from stratagem.options import VariableAggregation
from stratagem.variables.layouts import is_in_parts, put_stored
from stratagem.variables.registry import VariableRegistry

if TYPE_CHECKING:
    import jax
    import keras


# Conversion between an ON_READ variable's components and its aggregated value.


def aggregate_components(
    stacked: jax.Array | np.ndarray, aggregation: VariableAggregation, name: str
) -> Any:
    """Aggregates components of shape (num_replicas, ...) to a value of shape (...).

    Raises ValueError for aggregation NONE. Source: TF 2.21 values.py, SyncOnReadVariable.
    """
    with start_lock:
        if aggregation is VariableAggregation.SUM:
            return jnp.sum(stacked, axis=0, dtype=stacked.dtype)
        if aggregation is VariableAggregation.MEAN:
            return mean_of_components(stacked)
        if aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return stacked[0]
    raise invalid(
        f"Variable {name!r} is ON_READ with aggregation NONE, but was read in cross-replica "
        "context.",
        expected="an aggregation that combines its components to one value.",
        fix='create it with aggregation="sum", "mean" or "only_first_replica", or read it in a '
        "replica function.",
    )


def mean_of_components(stacked: jax.Array | np.ndarray) -> Any:
    """Returns the mean over axis 0; equal components give that value, not one rounded thrice."""
    mean = jnp.mean(stacked, axis=0)
    are_equal = jnp.all(stacked == stacked[:1], axis=0)
    return jnp.where(are_equal, stacked[0].astype(mean.dtype), mean)


def spread_over_components(value: Any, aggregation: VariableAggregation, num_replicas: int) -> Any:
    """Splits a value into components of shape (num_replicas, ...), the inverse of aggregation.

    With SUM, each component is value / num_replicas; the first also gets the remainder of an
    integer. Otherwise each component is the value. The result is a NumPy array, or a JAX array if
    traced.

    Source: TF 2.21 values_util.py, on_read_assign_cross_replica.
    """
    xp: Any = jnp if isinstance(value, Tracer) else np
    value = xp.asarray(value)
    shape = (num_replicas, *value.shape)
    if aggregation is not VariableAggregation.SUM or value.dtype == bool:
        return xp.array(xp.broadcast_to(value, shape))
    if xp.issubdtype(value.dtype, xp.integer):
        quotient, rest = value // num_replicas, value % num_replicas
        is_first = (xp.arange(num_replicas) == 0).reshape((-1,) + (1,) * value.ndim)
        return xp.where(is_first, quotient + rest, quotient)
    return xp.array(xp.broadcast_to(value / num_replicas, shape), value.dtype)


def stored_components(stacked: jax.Array | np.ndarray, topology: Topology) -> Any:
    """Shards an array of shape (num_replicas, ...) over the replicas' devices."""
    if topology.spans_processes and not isinstance(stacked, Tracer):
        first = topology.local_replica_ids[0]
        stacked = stacked[first : first + topology.num_local_replicas]
    return topology.put_stacked(stacked)


def store_components(variable: Any, stacked: jax.Array | np.ndarray, topology: Topology) -> None:
    """Stores an array of shape (num_replicas, ...), the same on all processes, in a variable."""
    variable.storage = stored_components(stacked, topology)
    if topology.spans_processes and not isinstance(stacked, Tracer):
        variable.whole.hold(variable.storage, stacked)


class WholeValue:
    """Cached value of a variable whose components are on several processes.

    All processes must read it together. Until the components change, each can then read it alone.
    """

    def __init__(self) -> None:
        self.storage: Any = None
        self.gathered: Any = None

    def hold(self, storage: object, gathered: object) -> None:
        """Caches the components of all replicas, which this process has."""
        self.storage, self.gathered = storage, gathered

    def of(self, storage: object, aggregation: VariableAggregation, name: str) -> Any:
        """Returns the aggregated value of the components, on this process."""
        gather_together([(self, storage)])
        return aggregate_components(self.gathered, aggregation, name)


def gather_together(wanted: list[tuple[WholeValue, Any]]) -> None:
    """Gathers many variables' components in one program and caches them.

    `wanted` pairs each cache with its components. All processes must call this together.
    """
    stale = [(whole, storage) for whole, storage in wanted if whole.storage is not storage]
    if stale:
        gathered = compute_on_every_process([storage for _, storage in stale])
        for (whole, storage), components in zip(stale, gathered, strict=True):
            whole.hold(storage, components)


# Components of an ON_READ variable after the members of an elastic group have changed.


def components_of_members(
    components: np.ndarray[Any, Any],
    aggregation: VariableAggregation,
    kept: Sequence[int | None],
) -> np.ndarray[Any, Any]:
    """Returns the components of the present members, of shape (len(kept), ...).

    `kept` has the row of each member in `components`, or None for one that has just joined. The
    variable keeps its value: with aggregation SUM, the first of those that were there takes the sum
    of the lost ones, and a new one adds nothing; with MEAN, a new one has the mean; with
    ONLY_FIRST_REPLICA, the first member has the component of the first one before.
    """
    is_sum = aggregation is VariableAggregation.SUM
    present = [row for row in kept if row is not None]
    rows = np.zeros((len(kept), *components.shape[1:]), components.dtype)
    for place, row in enumerate(kept):
        if row is not None:
            rows[place] = components[row]
        elif aggregation is VariableAggregation.MEAN:
            rows[place] = mean_of_components(components[present])
        elif not is_sum:
            rows[place] = components[present[0]]
    if is_sum and components.dtype != bool:
        lost = np.delete(components, present, axis=0)
        rows[kept.index(present[0])] += lost.sum(0, dtype=components.dtype)
    elif aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
        rows[0] = components[0]
    return rows


_DIGEST_BYTES = 2**24
_numbers = itertools.count()  # of variables, in the order in which processes agreed on them


def agree_on_initial_values(registry: VariableRegistry, topology: Topology) -> None:
    """Sets new variables to process 0's values. All processes must call this together.

    Sends only values with different digests. Raises RuntimeError if the processes created different
    variables.
    """
    if not topology.spans_processes:
        return
    if registry.has_unsettled:
        gc.collect()  # a discarded model is in cycles, which processes free at different times
    variables: list[Any] = registry.take_unsettled()
    group = current_group()
    if not variables or group is None:
        return
    own = [(v.path, list(v.shape), str(v.dtype), v.initial_digest) for v in variables]
    received = group.exchange(f"the initial values of {len(own)} variables", own)
    for label, others in zip(group.identity.labels, received, strict=True):
        for mine, theirs in itertools.zip_longest(own, others):
            if mine is None or theirs is None or mine[1:3] != theirs[1:3]:
                raise _different(label, theirs, group.identity.label, mine)
    for index, variable in enumerate(variables):
        variable.agreed_number = next(_numbers)
        if len({others[index][3] for others in received}) > 1:
            held = variable.take_initial() if is_in_parts(variable, topology) else None
            _take_first(variable, held, topology)
        else:
            variable.drop_initial()


def initial_digest(value: object, topology: Topology) -> int:
    """Returns the CRC-32 of an initial value, to compare processes; 0 in a single process."""
    if not topology.spans_processes:
        return 0
    array = np.atleast_1d(np.asarray(value))
    row_bytes = max(1, array.nbytes // max(1, len(array)))
    num_rows, digest = max(1, _DIGEST_BYTES // row_bytes), 0
    for begin in range(0, len(array), num_rows):  # never a copy of the whole
        digest = zlib.crc32(np.ascontiguousarray(array[begin : begin + num_rows]).tobytes(), digest)
    return digest


def _take_first(
    variable: keras.Variable, held: jax.Array | np.ndarray | None, topology: Topology
) -> None:
    """Sets a variable to process 0's value; `held` is its initial value if it is in parts."""
    is_component = False
    if held is None:
        stored = variable.storage
        is_component = stored.ndim > len(variable.shape)
        held = np.asarray(local_copy(stored, topology))
    own = held[0] if is_component else held
    each = Topology(topology.all_devices)  # processes may have one replica together
    value = compute_on_every_process(each.stack([own] * each.num_local_replicas), _first)
    if is_component:
        variable.storage = topology.stack([value] * topology.num_local_replicas)
    else:
        variable.storage = put_stored(variable, value, topology)


def _first(stacked: object) -> Any:
    return jnp.asarray(stacked)[0]


def _different(
    label: str, theirs: Sequence[Any] | None, own_label: str, mine: Sequence[Any] | None
) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{label} created {_named(theirs)}, but {own_label} created {_named(mine)}.",
            expected="the same variables in the same order on all processes.",
            fix="look for code that builds the model differently: a condition on the process, or "
            "an option that only one process received.",
        )
    )


def _named(description: Sequence[Any] | None) -> str:
    if description is None:
        return "no further variable"
    path, shape, dtype, _ = description
    return f"variable {path!r} of shape {shape} and dtype {dtype}"
