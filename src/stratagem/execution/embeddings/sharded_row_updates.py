"""Row-by-row updates of sharded tables: each device updates the rows of its own shard.

The trace marks where an update reads rows and where it writes them back. If everything in between
is computed element by element, each device can do it for its own rows, and no rows are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr
from jax.sharding import PartitionSpec

from stratagem.devices.mesh import Topology
from stratagem.execution.jaxprs import free_variables, is_by_element, retrace


# Jitted, so that the trace records them by name.
@jax.jit
def _stratagem_rows_to_update(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


@jax.jit
def _stratagem_with_updated_rows(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[ids].set(rows, mode="drop", unique_indices=True)


def rows_to_update(table: object, ids: jax.Array) -> jax.Array:
    """Returns the rows of a table, of shape (n, ...), that `with_updated_rows` writes back.

    `ids` are unique. An id of n or more stands for no row and returns an arbitrary one.
    """
    return _stratagem_rows_to_update(table, ids)


def with_updated_rows(table: object, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a table with the rows at `ids` replaced; see `rows_to_update`."""
    return _stratagem_with_updated_rows(table, ids, rows)


_READS, _WRITES = "_stratagem_rows_to_update", "_stratagem_with_updated_rows"


@dataclasses.dataclass(frozen=True)
class ShardedRowUpdates:
    """An update split in two: `rest` runs first, then each device runs `own` on its shards."""

    rest: Jaxpr  # outputs: those of the update that are not `is_own`, then values for `own`
    own: Jaxpr  # inputs: tables, then values from `rest`; outputs: the new tables
    tables: list[int]  # indices of the tables among the update's inputs
    is_own: list[bool]  # for each output of the update, True if `own` computes it
    topology: Topology

    @classmethod
    def of(cls, update: Jaxpr, are_parts: Sequence[bool], topology: Topology) -> ShardedRowUpdates:
        """Splits an update; `are_parts` marks inputs that are sharded along axis 0."""
        places = {id(one): place for place, one in enumerate(update.invars) if are_parts[place]}
        own = _updates_of_rows(update, places)
        made = {id(variable) for eqn in own for variable in eqn.outvars}
        is_own = [id(atom) in made for atom in update.outvars]
        needed = free_variables(own)
        tables = [places[id(atom)] for atom in needed if id(atom) in places]
        others = [atom for atom in needed if id(atom) not in places]
        outputs = list(zip(update.outvars, is_own, strict=True))
        of_own = {id(eqn) for eqn in own}
        return cls(
            rest=update.replace(
                eqns=[eqn for eqn in update.eqns if id(eqn) not in of_own],
                outvars=[*(atom for atom, own in outputs if not own), *others],
            ),
            own=update.replace(
                eqns=own,
                invars=[*(update.invars[place] for place in tables), *others],
                outvars=[atom for atom, own in outputs if own],
            ),
            tables=tables,
            is_own=is_own,
            topology=topology,
        )

    def values(self, inputs: Sequence[Any]) -> list[Any]:
        """Returns the outputs of the update for its inputs."""
        outputs = retrace(self.rest, inputs)
        if not self.own.eqns:
            return outputs
        end = len(outputs) - (len(self.own.invars) - len(self.tables))
        parted, copied = PartitionSpec(self.topology.shard_axis), PartitionSpec()
        run = jax.shard_map(
            lambda *values: retrace(self.own, values, _of_one_device(self.topology.shard_axis)),
            mesh=self.topology.mesh,
            in_specs=(*[parted] * len(self.tables), *[copied] * (len(outputs) - end)),
            out_specs=[parted] * sum(self.is_own),
            axis_names={*self.topology.replica_axes},
            check_vma=False,
        )
        made = iter(run(*[inputs[place] for place in self.tables], *outputs[end:]))
        others = iter(outputs[:end])
        return [next(made if own else others) for own in self.is_own]


def _updates_of_rows(update: Jaxpr, tables: Container[int]) -> list[Any]:
    """Returns the operations from reading rows to writing them; none if others take part."""
    own: list[Any] = []
    rows: set[int] = set()
    new_tables: set[int] = set()
    read: set[int] = set()
    for eqn in update.eqns:
        name = eqn.params.get("name")
        is_of_table = name in (_READS, _WRITES) and id(eqn.invars[0]) in tables
        read.update(id(atom) for atom in eqn.invars)
        if is_of_table and name == _READS:
            rows.update(map(id, eqn.outvars))
        elif not any(id(atom) in rows for atom in eqn.invars):
            continue
        elif is_of_table and id(eqn.invars[1]) not in rows:
            new_tables.update(map(id, eqn.outvars))
        elif is_by_element(eqn):
            rows.update(map(id, eqn.outvars))
        else:
            return []
        own.append(eqn)
    leaves_rows = any(id(atom) in rows for atom in update.outvars)
    return [] if leaves_rows or new_tables & read else own


def _own_rows(axis: str, part: jax.Array, ids: jax.Array) -> list[jax.Array]:
    """Returns this device's rows, and arbitrary ones in the place of other devices' rows."""
    return [jnp.take(part, _own_ids(axis, part, ids), axis=0, mode="clip")]


def _with_own_rows(axis: str, part: jax.Array, ids: jax.Array, rows: jax.Array) -> list[jax.Array]:
    own = _own_ids(axis, part, ids)
    return [part.at[own].set(rows, mode="drop", unique_indices=True)]


def _own_ids(axis: str, part: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns row numbers within this device's shard; the shard's length for other rows."""
    own = ids - (jax.lax.axis_index(axis) * len(part)).astype(ids.dtype)
    return jnp.where((own >= 0) & (own < len(part)), own, len(part))


def _of_one_device(axis: str) -> Mapping[str, Callable[..., list[jax.Array]]]:
    return {_READS: partial(_own_rows, axis), _WRITES: partial(_with_own_rows, axis)}
