"""`sg.value_and_grad`: gradients with respect to Keras variables or arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun

from stratagem.config import filters_traceback
from stratagem.errors import explain, invalid
from stratagem.execution.lookups import (
    Lookups,
    as_row_numbers,
    exchanges_rows,
    has_company,
    is_elsewhere,
    rows_pay,
    slices_of,
    tables_among,
)
from stratagem.execution.summary.collector import Collector
from stratagem.execution.summary.kinds import forward_summaries
from stratagem.execution.tracing.functionalize import (
    CapturedWrites,
    ReplicaScope,
    current_scope,
    initialize_created,
)
from stratagem.execution.tracing.remote_state import Ids, Lookup
from stratagem.variables.distributed import (
    IndexedSlices,
    Mirrored,
    PerReplica,
    is_array,
    is_distributed,
)
from stratagem.variables.layouts import is_keyed

if TYPE_CHECKING:
    import keras


@filters_traceback
def value_and_grad(
    fn: Callable[..., Any],
    variables: object,
    *,
    has_aux: bool = False,
    sparse_gradients: bool = False,
) -> Any:
    """Calls a function and returns its value and gradients. Call anywhere.

    Differentiates with respect to Keras variables that `fn` reads, or to a pytree of arrays that
    `fn` is called with, as in `jax.value_and_grad(fn)(arrays)`.

    In replica context the gradients are those of this replica's value; an optimizer's
    `apply_gradients` sums them over replicas. If `fn` only looks up rows of a table (a Keras
    `Embedding`, `sg.nn.embedding_lookup`), replicas exchange those rows when that is less data.

    Args:
        fn: called once (traced twice if it looks up rows), without arguments, or with `variables`
            if these are arrays. Returns a scalar, or with `has_aux` a pair of a scalar and any
            pytree. Its assignments to Keras variables take effect.
        variables: pytree of Keras variables, or of arrays and Python numbers.
        has_aux: True if `fn` returns a pair.
        sparse_gradients: True to return `IndexedSlices` for tables that are only looked up, for
            custom code that handles rows; every optimizer accepts them.

    Returns:
        `(value, gradients)`. `gradients` has the structure of `variables`; each gradient has its
        variable's shape and dtype. It is None for a variable that `fn` did not read or whose dtype
        has no gradient, and zeros for an array that `fn` did not use. With `has_aux`, `value` is
        the pair that `fn` returned.

    Raises:
        ValueError: no variables, as in a model that is not built; or the value is not a scalar.
        TypeError: `variables` holds other objects, or both variables and arrays.

    Example:
        >>> v = sg.Variable(3.0)
        >>> sg.value_and_grad(lambda: v * v, [v])
        (Array(9., dtype=float32), [Array(6., dtype=float32)])
        >>> sg.value_and_grad(lambda params: params["w"] ** 2, {"w": 3.0})
        (Array(9., dtype=float32, weak_type=True), {'w': Array(6., dtype=float32, weak_type=True)})

    Source: JAX, jax.value_and_grad; TF 2.21 backprop.py, GradientTape.gradient.
    """
    flat, structure = jax.tree.flatten(variables, is_leaf=is_distributed)
    if not flat:
        raise _nothing_given(variables)
    if _are_arrays(flat):
        return _by_arrays(fn, flat, structure, has_aux=has_aux)
    return _by_variables(fn, flat, structure, has_aux=has_aux, sparse_gradients=sparse_gradients)


def _by_arrays(
    fn: Callable[..., Any], flat: list[Any], structure: Any, *, has_aux: bool
) -> tuple[Any, Any]:
    arrays = jax.tree.unflatten(structure, [_as_array(leaf) for leaf in flat])
    call = _Differentiated(fn, [], has_aux=has_aux, arrays=(arrays,))
    value, _, (gradients,) = call.differentiate(call.tables_of_rows(is_wanted=False))
    return value, gradients


def _by_variables(
    fn: Callable[..., Any],
    flat: list[Any],
    structure: Any,
    *,
    has_aux: bool,
    sparse_gradients: bool,
) -> tuple[Any, Any]:
    call = _Differentiated(fn, flat, has_aux=has_aux)
    value, by_id, _ = call.differentiate(call.tables_of_rows(is_wanted=sparse_gradients))
    if not sparse_gradients:
        by_id = {key: _whole(gradient, current_scope()) for key, gradient in by_id.items()}
    return value, jax.tree.unflatten(structure, [by_id.get(id(variable)) for variable in flat])


def _whole(slices: object, scope: ReplicaScope | None) -> Any:
    """Converts rows to a dense array that an optimizer can map back to its rows.

    The compiler removes the array if nothing else uses it.
    """
    if not isinstance(slices, IndexedSlices):
        return slices
    gradient = slices.to_dense()
    if scope is not None:
        scope.note_rows(gradient, slices)
    return gradient


def _nothing_given(variables: object) -> ValueError:
    return invalid(
        f"value_and_grad received {variables!r}, which holds no variables or arrays.",
        expected="at least one variable or array; a model has no variables until it is built.",
        fix="build the model before reading model.trainable_variables: give it a keras.Input, "
        "or call model.build(input_shape).",
    )


def _are_arrays(flat: list[Any]) -> bool:
    """Returns True to differentiate with respect to arrays instead of variables."""
    kinds = {_is_number(leaf) for leaf in flat}
    if any(isinstance(leaf, PerReplica) for leaf in flat) or len(kinds) > 1:
        found = sorted({type(leaf).__name__ for leaf in flat})
        raise TypeError(
            explain(
                f"value_and_grad received a pytree of {', '.join(found)}.",
                expected="either Keras variables, or arrays of one replica.",
                fix="call it in the function passed to strategy.run, where a PerReplica is an "
                "array. Use two calls for variables and arrays.",
            )
        )
    return True in kinds


def _is_number(leaf: object) -> bool:
    is_number = isinstance(leaf, int | float | complex) and not isinstance(leaf, bool)
    return is_number or is_array(leaf) or isinstance(leaf, Mirrored)


def _as_array(leaf: object) -> jax.Array:
    array = jnp.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(
            explain(
                f"value_and_grad cannot differentiate by an array of dtype {array.dtype}.",
                expected="arrays of a floating-point dtype.",
                fix="remove it from the pytree and let the function close over it.",
            )
        )
    return array


class _Differentiated:
    """One function and the variables it reads, or the arrays it is called with."""

    def __init__(
        self,
        fn: Callable[..., Any],
        variables: list[Any],
        *,
        has_aux: bool,
        arrays: tuple[Any, ...] = (),
    ) -> None:
        self._fn = fn
        self._arrays = arrays
        self._has_aux = has_aux
        self._outer = current_scope()
        self._variables = [v for v in variables if jnp.issubdtype(jnp.dtype(v.dtype), jnp.inexact)]
        self._values = [_current_value(variable, self._outer) for variable in self._variables]
        self._counted = ReplicaScope(lambda _: None)  # of the call that counts lookups

    def _call(
        self, values: list[Any], lookups: Lookups, summaries: Collector, arrays: tuple[Any, ...]
    ) -> tuple[ReplicaScope, Any, Any]:
        """Calls the function with the given values of the variables."""
        outer = self._outer
        scope = ReplicaScope(outer.get_current_value if outer is not None else lambda _: None)
        for variable, value in zip(self._variables, values, strict=True):
            scope.set_value(variable, value)
        with scope, lookups, summaries:
            result = self._fn(*arrays)
            value, aux = result if self._has_aux else (result, None)
            value = jnp.asarray(value)  # in the scope: `value` may be a variable
        _require_scalar(value)
        return scope, value, aux

    def tables_of_rows(self, *, is_wanted: bool) -> list[tuple[Any, list[tuple[int, ...]]]]:
        """Returns the tables whose gradient stays as rows, and the shapes of their lookups.

        `is_wanted` is True if the caller asked for rows, no matter how many.
        """
        tables = [
            table for table in tables_among(self._variables) if is_wanted or rows_pay(table, ())
        ]
        is_traced = any(isinstance(value, Tracer) for value in self._values)
        receives = self._receive is not None
        has_keys = any(map(is_keyed, tables_among(self._variables)))
        # Op by op, an extra call costs as much as it saves.
        is_worth_it = tables and (is_wanted or (is_traced and has_company()))
        if not (receives or has_keys or is_worth_it):
            return []
        counted = Lookups(tables)
        read_ids: set[int] = set()

        def count(values: list[Any]) -> list[Any]:
            scope, _, _ = self._call(values, counted, Collector(), self._arrays)
            read_ids.update(scope.read_ids)
            self._counted = scope
            return [value for _, value in scope.early]

        if is_traced:
            jaxpr = jax.make_jaxpr(count)(self._values)
            if self._counted.early:  # layers are not built again: compute their values now
                values = jaxpr_as_fun(jaxpr)(*self._values)
                pairs = zip(self._counted.early, values, strict=True)
                self._counted.early = [(variable, value) for (variable, _), value in pairs]
        else:
            count(self._values)
        elsewhere = counted.tables_elsewhere
        return [
            (table, shapes)
            for table in {**{id(table): table for table in tables}, **elsewhere}.values()
            if (shapes := counted.shapes.get(id(table)))
            if id(table) not in read_ids or is_keyed(table)  # a keyed table has no whole value
            if is_wanted
            or rows_pay(table, shapes)
            or (id(table) in elsewhere and exchanges_rows(table, shapes))
        ]

    def differentiate(
        self, tables: list[tuple[Any, list[tuple[int, ...]]]]
    ) -> tuple[Any, dict[int, Any], tuple[Any, ...]]:
        """Returns the function's result, gradients by variable id, and gradients by array.

        Gradients of `tables`, as returned by `tables_of_rows`, are `IndexedSlices`.
        """
        captured: list[CapturedWrites] = []
        read_ids: set[int] = set()
        are_matched: list[bool] = []
        by_key = {id(table): table for table, _ in tables}
        plain_ids = {id(table) for table, _ in tables if not is_keyed(table)}
        received = self._received([one for one in tables if is_elsewhere(one[0])])
        summaries = Collector()

        def functional(inputs: tuple[Any, Any, Any]) -> tuple[Any, Any]:
            values, stand_ins, arrays = inputs
            rows = {key: [row for _, row in pairs] for key, pairs in received.items()}
            lookups = Lookups(list(by_key.values()), stand_ins, rows)
            summaries.clear()
            scope, value, aux = self._call(values, lookups, summaries, arrays)
            are_matched.append(lookups.are_matched and not plain_ids & scope.read_ids)
            read_ids.update(scope.read_ids)
            writes, updates = scope.captured()
            captured[:] = [writes]
            positions = lookups.ids, lookups.places
            return value, (aux, updates, positions, summaries.values)

        stand_ins = _stand_ins(tables)
        result, (grads, rows, by_array) = jax.value_and_grad(functional, has_aux=True)(
            (self._values, stand_ins, self._arrays)
        )
        value, (aux, updates, (ids, places), of_summaries) = result
        if not all(are_matched):  # the function behaved differently from the counting call
            return self.differentiate([])
        self._send_ids(received, ids)
        if self._outer is not None:
            self._record_builds(captured[0], self._outer)
        elif not isinstance(value, Tracer):
            initialize_created()  # variables of the function; in a step, the step does so
        captured[0].replay(updates, self._outer)
        forward_summaries(summaries.summaries, of_summaries)
        by_id = self._gradients_of_read(grads, read_ids)
        by_id |= {key: slices_of(table, places[key], rows[key]) for key, table in by_key.items()}
        return ((value, aux) if self._has_aux else value), by_id, by_array

    def _gradients_of_read(self, grads: list[Any], read_ids: set[int]) -> dict[int, Any]:
        pairs = zip(self._variables, grads, strict=True)
        return {id(variable): grad for variable, grad in pairs if id(variable) in read_ids}

    def _send_ids(
        self, received: dict[int, list[tuple[int, Any]]], ids: dict[int, list[jax.Array]]
    ) -> None:
        for key, pairs in received.items():
            for (place, _), own_ids in zip(pairs, ids[key], strict=True):
                assert self._outer is not None
                self._outer.outermost.send(Ids(place), as_row_numbers(own_ids))

    def _record_builds(self, again: CapturedWrites, outer: ReplicaScope) -> None:
        """Records assignments to new variables in the call that counts lookups.

        That call built the layers, so the next one, `again`, does not repeat their assignments.
        """
        num_more = self._counted.num_writes - again.num_writes
        for variable, value in self._counted.early:
            if num_more[id(variable)]:
                num_more[id(variable)] -= 1
                outer.num_writes[id(variable)] += 1
                outer.early.append((variable, value))

    @property
    def _receive(self) -> Callable[[Lookup], tuple[int, Any]] | None:
        """Returns the row lookup of the step; None where ids cannot leave the program."""
        outermost = None if self._outer is None else self._outer.outermost
        is_inside = outermost is not None and not outermost.is_at_its_own_level
        return None if outermost is None or is_inside else outermost.receive

    def _received(self, tables: list[Any]) -> dict[int, list[tuple[int, Any]]]:
        """Returns the index and rows of each lookup in remote or offloaded tables, by table id."""
        receive = self._receive
        if receive is None:
            return {}
        return {
            id(table): [receive(Lookup(table, shape, jnp.dtype(table.dtype))) for shape in shapes]
            for table, shapes in tables
        }


def _stand_ins(tables: list[tuple[Any, list[tuple[int, ...]]]]) -> dict[int, list[jax.Array]]:
    return {
        id(table): [jnp.zeros(shape, table.dtype) for shape in shapes] for table, shapes in tables
    }


def _current_value(variable: keras.Variable, scope: ReplicaScope | None) -> Any:
    value = scope.get_current_value(variable) if scope is not None else None
    return jnp.asarray(variable.value if value is None else value)


def _require_scalar(value: Any) -> None:
    shape = jnp.shape(value)
    if shape != ():
        raise invalid(
            f"The function given to value_and_grad returned a value of shape {shape}.",
            expected="a scalar.",
            fix="reduce it, for example with sg.compute_average_loss, or return "
            "(scalar, aux) and pass has_aux=True.",
        )
