"""Keyed tables as Keras variables: rows are on the servers, found by 64-bit keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import keras
import numpy as np
from jax.core import Tracer

from stratagem.errors import explain
from stratagem.keras.private import in_symbolic_scope
from stratagem.keras.variables.requests import current_annotations, is_initialized
from stratagem.parameter_server.client.table_client import TableClient
from stratagem.parameter_server.client.variable_client import Stored, name_of
from stratagem.parameter_server.keras.variable import ParameterServerVariable

if TYPE_CHECKING:
    import jax

    from stratagem.variables.distributed import IndexedSlices
    from stratagem.variables.sharded_variable import Rows


@dataclasses.dataclass(frozen=True)
class KeyedTableOptions:
    """Options of a new keyed table.

    Args:
        table: JSON fields of the servers' `TableOptions`, with the `max_rows` of all servers.
        skips_zero: True if the key 0 is padding, which has no row.
    """

    table: Mapping[str, Any]
    skips_zero: bool = False


class KeyedVariable(ParameterServerVariable):
    """A table on parameter servers with a row for each key, or its optimizer slot.

    Its shape is (0, ...), because its rows are only on the servers; steps look them up by key. So
    it has no value to read, save or assign.
    """

    is_keyed = True
    has_rows = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not is_initialized(self):
            self._options: KeyedTableOptions | None = current_annotations().keyed_table
        super().__init__(*args, **kwargs)

    @property
    def remote_table(self) -> tuple[TableClient, str] | None:
        """Client and name of the table, which checkpoints save; None for an optimizer slot."""
        if self._slot is not None:
            return None
        return TableClient(self.variable_client.client), name_of(self)

    @property
    def storage(self) -> Any:
        """An array without rows."""
        return np.zeros(self._shape, jnp.dtype(self._dtype))

    @storage.setter
    def storage(self, value: object) -> None:
        """Does nothing: a value without rows changes none."""

    def assign(self, value: Any) -> Any:
        """Raises a TypeError: a value of this shape has no rows. Slots accept such a value."""
        if self._slot is None or np.shape(value) != self.shape:
            raise _assigned(self)
        return self.value

    def _assign_delta(self, value: object, *, sign: int) -> Any:
        raise _assigned(self)

    def _initialize_with_initializer(self, initializer: Callable[..., Any]) -> None:
        if self._slot is not None:
            self.place = Stored(self._slot() if callable(self._slot) else self._slot)
            return
        options = self._options
        assert options is not None
        self.variable_client.create_keyed(self, options.table, skips_zero=options.skips_zero)

    def rows_outside(self, ids: object) -> Any:
        """Returns rows of keys, pairs of uint32, outside of compiled steps."""
        return self._looked_up(ids, is_trained=False)[0]

    def looked_up(self, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns rows of keys in an eager step, and the places of their gradients."""
        return self._looked_up(keys, is_trained=True)

    def take_rows(self, rows: Rows) -> Any:
        """Raises a TypeError: rows have keys, and no numbers."""
        raise _rows_by_number(self)

    def change_rows(self, method: str, slices: IndexedSlices) -> Any:
        """Raises a TypeError: rows have keys, and no numbers."""
        raise _rows_by_number(self)

    def _looked_up(self, keys: Any, *, is_trained: bool) -> tuple[Any, Any]:
        if in_symbolic_scope():  # only the shape matters
            return jnp.zeros((*keys.shape[:-1], *self.shape[1:]), self.dtype), None
        if isinstance(keys, Tracer):
            raise ValueError(
                explain(
                    f"Keys were looked up in {self.path!r} inside lax.scan, lax.cond, jax.jit or "
                    "the like.",
                    expected="lookups in the replica function itself, which receives the rows "
                    "from the servers before it runs.",
                    fix="look the keys up before, and use the rows inside.",
                )
            )
        remote = self._home.strategy.placement.remote
        rows, places = remote.rows_of_keys(self, np.asarray(keys), is_trained=is_trained)
        return self._maybe_autocast(jnp.asarray(rows)), jnp.asarray(places)


def _assigned(variable: keras.Variable) -> TypeError:
    return TypeError(
        explain(
            f"The keyed table {variable.path!r} was assigned a value. Its shape has no rows: they "
            "are on the servers, by key.",
            expected="rows that an optimizer changes, or that are restored.",
            fix="restore rows with sg.embedding.restore or sg.train.Checkpoint. set_weights, and "
            "with it EarlyStopping(restore_best_weights=True), cannot set them.",
        )
    )


def _rows_by_number(variable: keras.Variable) -> TypeError:
    return TypeError(
        explain(
            f"Rows of the keyed table {variable.path!r} were read or changed by number.",
            expected="rows by key: the table has no other numbers.",
            fix="look rows up with sg.nn.embedding_lookup(table, sg.embedding.keys(ids)); an "
            "optimizer changes them.",
        )
    )


def whole_gradient(variable: keras.Variable) -> ValueError:
    """Returns the error for a gradient of a keyed table that is no longer rows."""
    return ValueError(
        explain(
            f"The optimizer received a gradient of the keyed table {variable.path!r} that was "
            "changed after sg.value_and_grad.",
            expected="the gradient itself, or IndexedSlices.",
            fix="pass sparse_gradients=True to sg.value_and_grad, and change the values of the "
            "IndexedSlices with dataclasses.replace. Optimizers clip gradients by themselves.",
        )
    )
