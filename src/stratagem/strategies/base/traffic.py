"""Bytes that a training step moves for the variables of a strategy.

They follow from the placement of the variables, the compression and the method of local updates.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from stratagem.devices.compression import Compression
from stratagem.devices.local_updates import LocalUpdates, fragments_of
from stratagem.devices.mesh import Topology
from stratagem.strategies.base.description import DescribedTransfer
from stratagem.variables.compressed import is_compressed, is_compressible
from stratagem.variables.placement import Placement
from stratagem.variables.sharded_store import ShardedStore
from stratagem.variables.store import is_remote, store_of

# How, and what.
_Transfer = tuple[str, str]

_SUM: _Transfer = ("all-reduce", "gradients")
_CHANGES: _Transfer = ("all-reduce", "changes of weights")
_ROUNDED_SUM: _Transfer = ("all-reduce in bfloat16", "gradients")
_SCATTER: _Transfer = ("reduce-scatter", "gradients")
_GATHER: _Transfer = ("all-gather", "values")
_PULL: _Transfer = ("pull from servers", "values")
_PUSH: _Transfer = ("push to servers", "gradients")
_PULL_ROWS: _Transfer = ("pull from servers", "rows looked up")
_PUSH_ROWS: _Transfer = ("push to servers", "gradients of rows")
_COPY: _Transfer = ("copy from the host to each replica", "values")
_COPY_BACK: _Transfer = ("copy from replica 0 to the host", "gradients")
_ROWS: _Transfer = ("exchange of rows", "rows looked up, and their gradients")
_BRING: _Transfer = ("copy from pinned host memory", "values and optimizer state")
_PUT_BACK: _Transfer = ("copy to pinned host memory", "values and optimizer state")
_BY_BATCH = (_PULL_ROWS, _PUSH_ROWS, _ROWS)


def array_bytes(variable: Any) -> int:
    """Returns the size of a whole variable, counted once."""
    return math.prod(variable.shape) * jnp.dtype(variable.dtype).itemsize


def transfers_of(
    variables: Sequence[Any],
    placement: Placement,
    topology: Topology,
    *,
    has_slots: bool,
    compression: Compression | None = None,
    in_bfloat16: bool = False,
    local_updates: LocalUpdates | None = None,
) -> list[DescribedTransfer]:
    """Returns the transfers of a step that trains the trainable ones of these variables.

    `has_slots` means that the optimizer's state is among them; otherwise each trained variable is
    assumed to have a slot. `in_bfloat16` means that sums of float32 are sent as bfloat16. The sums
    of losses and metrics, a few bytes each, are left out, and so are the first steps of local
    updates, which may synchronize more often.
    """
    if local_updates is not None and not placement.is_remote and topology.num_replicas > 1:
        trained = [one for one in variables if _is_trained(one)]
        return _synchronizations(trained, local_updates, topology.num_replicas)
    totals: collections.Counter[_Transfer] = collections.Counter()
    compressed: list[Any] = []
    stores = {id(one.slot_of): store_of(one) for one in variables if _is_slot(one)}
    for variable in variables:
        if _is_trained(variable):
            if id(variable) in stores or has_slots or is_remote(variable):
                slot_store = stores.get(id(variable))
            else:
                slot_store = placement.choose(variable, variable)
            kinds = _kinds(variable, slot_store, topology.num_replicas)
            if _SUM in kinds and is_compressed(variable, compression):
                compressed.append(variable)
                continue
            if in_bfloat16 and jnp.dtype(variable.dtype) == jnp.float32:
                kinds = [_ROUNDED_SUM if kind == _SUM else kind for kind in kinds]
            totals.update(dict.fromkeys(kinds, array_bytes(variable)))
        if getattr(store_of(variable), "is_pinned", False):
            part = array_bytes(variable) // topology.num_replicas
            totals.update(dict.fromkeys((_BRING, _PUT_BACK), part))
    found = [_described(kind, size, topology.num_replicas) for kind, size in totals.items()]
    if local_updates is not None:
        found = [_once_a_period(one, local_updates) for one in found]
    if compression is not None and compressed:
        found.append(_compressed(compressed, _SUM[1], compression, topology.num_replicas))
    return found


def _once_a_period(one: DescribedTransfer, method: LocalUpdates) -> DescribedTransfer:
    """Returns a transfer to or from servers as the mean of a step; rows are sent in each step."""
    kind = (one.kind, one.arrays)
    if kind not in (_PULL, _PUSH):
        return one
    return dataclasses.replace(
        one,
        arrays=_CHANGES[1] if kind == _PUSH else one.arrays,
        sent_bytes=(one.sent_bytes or 0) // method.least_period,
        every_steps=method.least_period,
    )


def _synchronizations(
    trained: Sequence[Any], method: LocalUpdates, num_replicas: int
) -> list[DescribedTransfer]:
    """Returns the transfers of local updates, as the mean of a step."""
    compression: Any = method.compression
    totals: dict[str, DescribedTransfer] = {}
    for fragment, _ in fragments_of(trained, method):
        whole = sum(array_bytes(one) for one in fragment if not is_compressed(one, compression))
        parts = [_described(_CHANGES, whole, num_replicas)]
        if compressed := [one for one in fragment if is_compressed(one, compression)]:
            parts.append(_compressed(compressed, _CHANGES[1], compression, num_replicas))
        for part in parts if whole else parts[1:]:
            before = totals.get(part.kind)
            totals[part.kind] = part if before is None else _together(before, part)
    return [
        dataclasses.replace(
            one,
            sent_bytes=(one.sent_bytes or 0) // method.least_period,
            every_steps=method.least_period,
        )
        for one in totals.values()
    ]


def _together(first: DescribedTransfer, second: DescribedTransfer) -> DescribedTransfer:
    return dataclasses.replace(
        first,
        num_bytes=(first.num_bytes or 0) + (second.num_bytes or 0),
        sent_bytes=(first.sent_bytes or 0) + (second.sent_bytes or 0),
    )


def _compressed(
    variables: Sequence[Any], arrays: str, compression: Compression, num_replicas: int
) -> DescribedTransfer:
    """Returns the sum of what belongs to variables and travels together."""
    shapes = [tuple(one.shape) for one in variables]
    return DescribedTransfer(
        f"all-reduce by {type(compression).__name__}",
        arrays,
        sum(array_bytes(one) for one in variables),
        compression.sent_bytes(*shapes, num_replicas=num_replicas),
    )


def shapes_summed(variables: Sequence[Any]) -> list[tuple[int, ...]]:
    """Returns the shapes of the gradients that may be compressed, or are summed beside them."""
    trained = [one for one in variables if _is_trained(one) and not is_remote(one)]
    return [tuple(one.shape) for one in trained if is_compressible(one)]


def _is_slot(variable: object) -> bool:
    return getattr(variable, "slot_of", None) is not None


def _is_trained(variable: object) -> bool:
    return bool(getattr(variable, "trainable", False)) and not _is_slot(variable)


def _kinds(variable: Any, slot_store: object, num_replicas: int) -> Sequence[_Transfer]:
    """Returns the transfers of one trained variable."""
    store, has_rows = store_of(variable), getattr(variable, "has_rows", False)
    if is_remote(variable):
        return (_PULL_ROWS, _PUSH_ROWS) if has_rows else (_PULL, _PUSH)
    if store is None:
        if num_replicas == 1:
            return ()
        return (_SCATTER, _GATHER) if isinstance(slot_store, ShardedStore) else (_SUM,)
    if has_rows:
        return (_ROWS,)
    if not store.is_on_replicas:
        return (_COPY, *((_SUM,) if num_replicas > 1 else ()), _COPY_BACK)
    return (_GATHER, _SCATTER) if num_replicas > 1 else ()


def _described(kind: _Transfer, size: int, num_replicas: int) -> DescribedTransfer:
    if kind in _BY_BATCH:
        return DescribedTransfer(*kind, None, None)
    sent = {
        # A ring: every replica passes on one part at a time.
        _SUM: 2 * size * (num_replicas - 1) // num_replicas,
        _CHANGES: 2 * size * (num_replicas - 1) // num_replicas,
        _ROUNDED_SUM: size * (num_replicas - 1) // num_replicas,
        _SCATTER: size * (num_replicas - 1) // num_replicas,
        _GATHER: size * (num_replicas - 1) // num_replicas,
        _PULL: 0,
        _COPY: 0,
        _BRING: 0,
    }
    return DescribedTransfer(*kind, size, sent.get(kind, size))
