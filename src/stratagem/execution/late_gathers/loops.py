"""Scans over stacked weights: each iteration has a shard of its own layer's weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.sharding import PartitionSpec

from stratagem.execution.jaxprs import readers_of, scan_counts, shape_of
from stratagem.execution.late_gathers.weights import (
    Deferred,
    Sharded,
    WeightShard,
    inner_jaxpr,
)

if TYPE_CHECKING:
    from jax.extend.core import JaxprEqn


def is_late_loop(eqn: JaxprEqn, inputs: Sequence[Any]) -> bool:
    """Returns True for a scan that gets a slice of a sharded stack in each iteration."""
    if eqn.primitive.name != "scan" or eqn.effects or eqn.params["jaxpr"].consts:
        return False
    return any(map(is_sliced, inputs[sum(scan_counts(eqn)) :]))


def is_sliced(value: Any) -> bool:
    """Returns True for a sharded stack whose slices are shards."""
    return isinstance(value, WeightShard) and value.sharded.axis > 0


def sharded_slice(stack: Sharded) -> Sharded:
    """Returns how a slice of a stack is sharded."""
    spec = PartitionSpec(*stack.logical_spec[1:])
    return dataclasses.replace(stack, axis=stack.axis - 1, logical_spec=spec)


def sharded_stack(one: Sharded) -> Sharded:
    """Returns how a stack of values is sharded."""
    spec = PartitionSpec(None, *one.logical_spec) if one.logical_spec else one.logical_spec
    return dataclasses.replace(one, axis=one.axis + 1, logical_spec=spec)


def stacked_shards(eqn: JaxprEqn, inputs: Sequence[Any]) -> list[WeightShard] | None:
    """Returns the weights that an operation stacks; None for other operations."""
    if eqn.primitive.name != "concatenate" or eqn.params["dimension"] != 0:
        return None
    shards: list[WeightShard] = []
    for one in inputs:
        if not isinstance(one, Deferred) or not _adds_axis(one.eqn):
            return None
        (shard,) = one.inputs
        if not isinstance(shard, WeightShard) or shard.sharded != _first(shards, shard).sharded:
            return None
        shards.append(shard)
    return shards


def _first(shards: Sequence[WeightShard], other: WeightShard) -> WeightShard:
    return shards[0] if shards else other


def _adds_axis(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "broadcast_in_dim" or isinstance(eqn.invars[0], Literal):
        return False
    return tuple(eqn.params["shape"]) == (1, *shape_of(eqn.invars[0]))


def narrower_dtype(jaxpr: Jaxpr, atom: Any) -> Any:
    """Returns the dtype of fewer bytes that all operations cast a value to; None without one."""
    dtypes = _dtypes_read(jaxpr, atom)
    (dtype,) = dtypes if len(dtypes) == 1 else (None,)
    return dtype if dtype is not None and dtype.itemsize < atom.aval.dtype.itemsize else None


def _dtypes_read(jaxpr: Jaxpr, atom: Any) -> set[Any]:
    """Returns the dtypes that a value is cast to; None stands for another use."""
    found: set[Any] = set()
    if any(one is atom for one in jaxpr.outvars):
        found.add(None)
    for eqn in jaxpr.eqns:
        for place, one in enumerate(eqn.invars):
            if one is atom:
                found |= _dtypes_read_by(eqn, place)
    return found


def _dtypes_read_by(eqn: JaxprEqn, place: int) -> set[Any]:
    if eqn.primitive.name == "convert_element_type":
        return {jnp.dtype(eqn.params["new_dtype"])}
    inner = eqn.params["jaxpr"].jaxpr if eqn.primitive.name == "scan" else inner_jaxpr(eqn)
    return {None} if inner is None else _dtypes_read(inner, inner.invars[place])


def shard_of(value: Any) -> WeightShard | None:
    """Returns a value as a shard if it is one, or is a cast of one; otherwise None."""
    if isinstance(value, WeightShard):
        return value
    if not isinstance(value, Deferred) or value.eqn.primitive.name != "convert_element_type":
        return None
    (shard,) = value.inputs
    is_shard = isinstance(shard, WeightShard)
    return shard if is_shard and shard.value.dtype == value.eqn.params["new_dtype"] else None


def summed_stacks(
    jaxpr: Jaxpr, addends: Mapping[Any, Sharded]
) -> tuple[dict[Any, Sharded], set[Any]]:
    """Finds results of scans of which each iteration can sum its own slice.

    Returns how each such stack is sharded, and the addends that are then summed already. All of a
    stack is summed, and nothing else reads it: it is an addend itself, or its slices are.
    """
    readers = readers_of(jaxpr)
    stacks: dict[Any, Sharded] = {}
    done: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "scan":
            continue
        for atom in eqn.outvars[scan_counts(eqn)[1] :]:
            found = _sums_of_slices(atom, readers, addends)
            shardings = {id(one): addends[one] for one in found}
            first = next(iter(shardings.values()), None)
            if first is None or any(one != first for one in shardings.values()):
                continue
            is_whole = found == [atom]
            if is_whole and not first.axis:
                continue
            stacks[atom] = first if is_whole else sharded_stack(first)
            done.update(found)
    return stacks, done


def _sums_of_slices(
    atom: Any,
    readers: Mapping[Any, Sequence[JaxprEqn | None]],
    addends: Mapping[Any, Sharded],
) -> list[Any]:
    """Returns the addends that are slices of a stack; none if something else reads the stack."""
    reading = readers[atom]
    if atom in addends:
        return [atom] if [*reading] in ([], [None]) else []
    eqn = reading[0] if len(reading) == 1 else None
    if eqn is None:
        return []
    # Neither operation has the shape of a slice among its parameters, so they work on shards, too.
    if eqn.primitive.name == "split" and eqn.params["axis"] == 0:
        if any(size != 1 for size in eqn.params["sizes"]):
            return []
        parts = [one for one in eqn.outvars if any(read is not None for read in readers[one])]
        found = [_sums_of_slices(one, readers, addends) for one in parts]
        return [one for each in found for one in each] if all(found) else []
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    if eqn.primitive.name not in ("reduce_sum", "squeeze") or tuple(axes) != (0,):
        return []
    return _sums_of_slices(eqn.outvars[0], readers, addends)
