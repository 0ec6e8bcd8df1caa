"""Updates of the rows of a table that lies in parts, by rows: each device makes those of its part.

Such an update is marked in the trace where it reads the rows and where it writes them back. If what
is between computes each row by itself, a device may do that for its own rows alone, and no row has
to be sent for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, Literal
from jax.sharding import PartitionSpec

from stratagem.execution.analysis.replication import inner_jaxprs
from stratagem.execution.analysis.retracing import retrace
from stratagem.topology import REPLICA_AXIS, Topology

__all__ = ["ShardedRowUpdates", "rows_to_update", "with_updated_rows"]

# They compute each element of their results from those at its place.
_BY_ELEMENT = frozenset(
    [
        *("abs", "add", "convert_element_type", "copy", "div", "exp", "integer_pow", "log", "max"),
        *("min", "mul", "ne", "neg", "pow", "reduce_precision", "rsqrt", "select_n", "sign"),
        *("sqrt", "square", "stop_gradient", "sub", "tanh"),
    ]
)
_CALLS = frozenset(["closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit"])


# As functions of their own they are known in the trace by their names.
@jax.jit
def _stratagem_rows_to_update(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take(table, ids, axis=0, mode="clip")


@jax.jit
def _stratagem_with_updated_rows(table: jax.Array, ids: jax.Array, rows: jax.Array) -> jax.Array:
    return table.at[ids].set(rows, mode="drop", unique_indices=True)


def rows_to_update(table: Any, ids: jax.Array) -> jax.Array:
    """Returns rows of a table that `with_updated_rows` writes back.

    Args:
        table: array of shape (n, ...).
        ids: their numbers, none twice; what is n or more stands for no row, and gets any.
    """
    return _stratagem_rows_to_update(table, ids)


def with_updated_rows(table: Any, ids: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a table with other rows.

    Args:
        table: array of shape (n, ...).
        ids: as of `rows_to_update`.
        rows: what takes the place of these.
    """
    return _stratagem_with_updated_rows(table, ids, rows)


_READS, _WRITES = "_stratagem_rows_to_update", "_stratagem_with_updated_rows"


@dataclasses.dataclass(frozen=True)
class ShardedRowUpdates:
    """An update in two parts.

    Args:
        rest: what is computed first. Its inputs are those of the update; its outputs those of the
            update that `is_own` does not tell, and what `own` needs.
        own: what each device computes for the rows of its own parts. Its inputs are tables, and
            what `rest` hands over; its outputs are these tables.
        tables: which inputs of the update are the tables.
        is_own: of each output of the update whether `own` makes it.
        topology: the devices.
    """

    rest: Jaxpr
    own: Jaxpr
    tables: list[int]
    is_own: list[bool]
    topology: Topology

    @classmethod
    def of(cls, update: Jaxpr, are_parts: Sequence[bool], topology: Topology) -> ShardedRowUpdates:
        """Parts an update.

        Args:
            update: the update.
            are_parts: of each of its inputs whether it lies in parts along its first axis.
            topology: the devices.
        """
        places = {id(one): place for place, one in enumerate(update.invars) if are_parts[place]}
        own = _updates_of_rows(update, places)
        made = {id(variable): variable for eqn in own for variable in eqn.outvars}
        is_own = [id(atom) in made for atom in update.outvars]
        needed = {
            id(atom): atom
            for eqn in own
            for atom in eqn.invars
            if not isinstance(atom, Literal) and id(atom) not in made
        }
        tables = [places[key] for key in needed if key in places]
        others = [atom for key, atom in needed.items() if key not in places]
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
        """Computes what the update does.

        Args:
            inputs: of the update.

        Returns:
            Its outputs.
        """
        outputs = retrace(self.rest, inputs)
        if not self.own.eqns:
            return outputs
        end = len(outputs) - (len(self.own.invars) - len(self.tables))
        parted, copied = PartitionSpec(REPLICA_AXIS), PartitionSpec()
        run = jax.shard_map(
            lambda *values: retrace(self.own, values, _OF_ONE_DEVICE),
            mesh=self.topology.mesh,
            in_specs=(*[parted] * len(self.tables), *[copied] * (len(outputs) - end)),
            out_specs=[parted] * sum(self.is_own),
            axis_names={REPLICA_AXIS},
            check_vma=False,
        )
        made = iter(run(*[inputs[place] for place in self.tables], *outputs[end:]))
        others = iter(outputs[:end])
        return [next(made if own else others) for own in self.is_own]


def _updates_of_rows(update: Jaxpr, tables: Container[int]) -> list[Any]:
    """The operations from reading rows of tables to writing them; none where others take part."""
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
        elif _is_by_element(eqn):
            rows.update(map(id, eqn.outvars))
        else:
            return []
        own.append(eqn)
    leaves_rows = any(id(atom) in rows for atom in update.outvars)
    return [] if leaves_rows or new_tables & read else own


def _is_by_element(eqn: Any) -> bool:
    if eqn.primitive.name not in _CALLS:
        return eqn.primitive.name in _BY_ELEMENT
    inner = [jaxpr for value in eqn.params.values() for jaxpr in inner_jaxprs(value)]
    return all(_is_by_element(one) for jaxpr in inner for one in jaxpr.eqns)


def _own_rows(part: jax.Array, ids: jax.Array) -> list[jax.Array]:
    """The rows that this device has; of others any."""
    return [jnp.take(part, _own_ids(part, ids), axis=0, mode="clip")]


def _with_own_rows(part: jax.Array, ids: jax.Array, rows: jax.Array) -> list[jax.Array]:
    return [part.at[_own_ids(part, ids)].set(rows, mode="drop", unique_indices=True)]


def _own_ids(part: jax.Array, ids: jax.Array) -> jax.Array:
    """The numbers of rows in this device's part; one past its end for what it does not have."""
    own = ids - (jax.lax.axis_index(REPLICA_AXIS) * len(part)).astype(ids.dtype)
    return jnp.where((own >= 0) & (own < len(part)), own, len(part))


_OF_ONE_DEVICE: Mapping[str, Callable[..., list[jax.Array]]] = {
    _READS: _own_rows,
    _WRITES: _with_own_rows,
}
