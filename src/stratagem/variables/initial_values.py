"""Broadcast of process 0's initial values of variables to all processes."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from stratagem.devices.lockstep import compute_on_every_process
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import local_copy
from stratagem.errors import explain
from stratagem.group.current import current_group
from stratagem.variables.layouts import is_in_parts, put_stored
from stratagem.variables.registry import VariableRegistry

if TYPE_CHECKING:
    import jax
    import keras


_DIGEST_BYTES = 2**24
_numbers = itertools.count()  # of variables, in the order in which processes agreed on them


def agree_on_initial_values(registry: VariableRegistry, topology: Topology) -> None:
    """Sets new variables to process 0's values. All processes must call this together.

    Sends only values with different digests. Raises RuntimeError if the processes created different
    variables.
    """
    if not topology.spans_processes:
        return
    variables: list[Any] = registry.take_unsettled()
    group = current_group()
    if not variables or group is None:
        return
    own = [(v.path, list(v.shape), str(v.dtype), v.initial_digest) for v in variables]
    received = group.exchange(f"the initial values of {len(own)} variables", own)
    for label, others in zip(group.identity.labels, received, strict=True):
        for mine, theirs in zip(own, others, strict=False):
            if mine[1:3] != theirs[1:3]:
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
    label: str, theirs: Sequence[Any], own_label: str, mine: Sequence[Any]
) -> RuntimeError:
    return RuntimeError(
        explain(
            f"{label} created variable {theirs[0]!r} of shape {theirs[1]} and dtype {theirs[2]}, "
            f"but {own_label} created {mine[0]!r} of shape {mine[1]} and dtype {mine[2]}.",
            expected="the same variables in the same order on all processes.",
            fix="look for code that builds the model differently: a condition on the process, or "
            "an option that only one process received.",
        )
    )
