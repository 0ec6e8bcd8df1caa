"""Carry of `run_steps`: state that a function passes from step to step, as in `jax.lax.scan`.

Each array is stored in a `CarrySlot`, which steps read and write like a variable with one component
per replica. Programs and eager mode therefore need no special case.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from stratagem.devices.abstract_devices import placeholder
from stratagem.devices.shards import local_copy
from stratagem.errors import explain
from stratagem.execution.replica_context import get_replica_context, is_key
from stratagem.execution.tracing.functionalize import current_scope
from stratagem.execution.tracing.lost_changes import name_of
from stratagem.execution.tracing.tracer import as_values
from stratagem.options import ReduceOp, VariableAggregation
from stratagem.variables.distributed import Mirrored, PerReplica, is_array
from stratagem.variables.registry import Home, VariableKind

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts
    from stratagem.execution.programs.lockstep import Lockstep


class CarrySlot:
    """One array of a carry, stored like a variable with a component per replica.

    `value` is one replica's array; `path` is its place in the carry, for messages.
    """

    has_value = True
    trainable = False

    def __init__(self, strategy: StrategyParts, value: jax.Array, path: str) -> None:
        self.path = path
        self.given_shape, self.given_dtype = value.shape, value.dtype
        self.key_impl = jax.random.key_impl(value) if is_key(value) else None
        data = self.as_stored(value)
        self.shape, self.dtype = data.shape, data.dtype
        self.stored: Any = None
        is_sole = strategy.num_replicas_in_sync == 1
        kind = VariableKind.PLAIN if is_sole else VariableKind.ON_READ
        strategy.variables.add_slot(self, Home(strategy, kind, VariableAggregation.NONE))

    @property
    def for_step(self) -> Any:
        """The value that a compiled step receives."""
        return self.stored

    @property
    def storage(self) -> Any:
        """The array of all replicas, under the name that variables have for it."""
        return self.stored

    @storage.setter
    def storage(self, value: object) -> None:
        self.stored = value

    def as_stored(self, value: jax.Array) -> Any:
        """Returns a value in its stored form: random keys as their key data."""
        return jnp.asarray(value) if self.key_impl is None else jax.random.key_data(value)

    def given(self, data: Any) -> Any:
        """Returns a stored value in the form that the function receives."""
        return data if self.key_impl is None else jax.random.wrap_key_data(data, impl=self.key_impl)

    def read(self) -> Any:
        """Returns this replica's value. Call in a step."""
        scope = current_scope()
        return self.given(self.stored if scope is None else scope.get_current_value(self))

    def write(self, value: jax.Array) -> None:
        """Sets this replica's value. Call in a step."""
        scope = current_scope()
        if scope is None:  # the default strategy runs functions without a scope
            self.stored = self.as_stored(value)
        else:
            scope.add_update((self, self.as_stored(value)))


class Carry:
    """State passed between steps of one `run_steps` call; its leaves are `PerReplica` or shared."""

    def __init__(self, strategy: StrategyParts, initial: object) -> None:
        self._strategy = strategy
        self._topology = strategy.topology
        pairs, self.structure = jax.tree_util.tree_flatten_with_path(
            as_values(initial), is_leaf=_is_distributed
        )
        paths = [_path(path) for path, _ in pairs]
        parts = [_parts(leaf, path) for path, (_, leaf) in zip(paths, pairs, strict=True)]
        key = self.structure, tuple((one[0].shape, one[0].dtype) for one in parts)
        known: dict[Any, tuple[CarrySlot, ...]] = cast("Lockstep", strategy.executor).carries
        if key not in known:
            firsts = zip(paths, parts, strict=True)
            known[key] = tuple(CarrySlot(strategy, one[0], path) for path, one in firsts)
        self.slots = known[key]
        for slot, own in zip(self.slots, parts, strict=True):
            slot.stored = self._stored([slot.as_stored(part) for part in own])

    def _stored(self, parts: list[Any]) -> Any:
        """Returns the array of all replicas as a copy, because a step donates it."""
        topology, first = self._topology, parts[0]
        is_sole = topology.num_replicas == 1
        if topology.is_abstract:
            replicas = () if is_sole else (topology.num_replicas,)
            return placeholder((*replicas, *first.shape), first.dtype)
        if is_sole:
            return topology.replicate(jnp.array(first, copy=True))
        parts = parts * topology.num_local_replicas if len(parts) == 1 else parts
        return topology.stack([jnp.array(part, copy=True) for part in parts])

    def take(self) -> Any:
        """Returns the state after the last step and drops it here."""
        is_sole = self._topology.num_replicas == 1
        values: list[Any] = []
        for slot in self.slots:
            value, slot.stored = slot.stored, None
            value = local_copy(value, self._topology) if is_sole else value
            values.append(slot.given(value) if is_sole else PerReplica(stacked=slot.given(value)))
        return jax.tree.unflatten(self.structure, values)


def _is_distributed(leaf: object) -> bool:
    return isinstance(leaf, PerReplica | Mirrored)


def _path(path: tuple[Any, ...]) -> str:
    return f"carry{jax.tree_util.keystr(path)}"


def _parts(leaf: object, path: str) -> list[Any]:
    """Returns the components of one leaf; a single one if all replicas get the same."""
    if isinstance(leaf, PerReplica):
        components = [jnp.asarray(part) for part in leaf.components]
        shapes = [part.shape for part in components]
        if len(set(shapes)) > 1:
            raise ValueError(
                explain(
                    f"run_steps received {path} with parts of shapes {shapes}.",
                    expected="one shape on all replicas, because they run one program.",
                    fix="pad the parts, and add their true lengths to the carry.",
                )
            )
        return components
    leaf = leaf.value if isinstance(leaf, Mirrored) else leaf
    if not (is_array(leaf) or isinstance(leaf, int | float | complex)):
        raise TypeError(
            explain(
                f"run_steps received {path}={leaf!r} of type {type(leaf).__name__}.",
                expected="a pytree of arrays and numbers.",
                fix="let the function close over everything else.",
            )
        )
    return [jnp.asarray(leaf)]


@dataclasses.dataclass(frozen=True)
class CarryingStep:
    """A function of a batch and a carry, wrapped as a replica function of the batch.

    A dataclass instead of a closure, because equal ones share a program.
    """

    fn: Any  # its `fn` is the user's function
    slots: tuple[CarrySlot, ...]
    structure: Any
    op: ReduceOp | None  # combines results over replicas; None leaves them separate

    @property
    def _name(self) -> str:
        return name_of(self.fn.fn)

    def __call__(self, batch: object) -> Any:
        """Runs one step of a replica."""
        carry = jax.tree.unflatten(self.structure, [slot.read() for slot in self.slots])
        result = self.fn(batch, carry)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TypeError(
                explain(
                    f"{self._name} returned a value of type {type(result).__name__}.",
                    expected="a pair (carry, result), because run_steps was called with a carry.",
                    fix="write `return carry, result`, or `return carry, None`.",
                    code="SG410",
                )
            )
        carry, result = as_values(result)
        for slot, leaf in zip(self.slots, self._leaves(carry), strict=True):
            slot.write(leaf)
        context = get_replica_context()
        assert context is not None
        return result if self.op is None else context.all_reduce(self.op, result)

    def _leaves(self, carry: object) -> list[Any]:
        """Returns the arrays of the next carry; raises if their shapes or dtypes changed."""
        pairs, structure = jax.tree_util.tree_flatten_with_path(carry)
        if structure != self.structure:
            raise ValueError(
                explain(
                    f"{self._name} received a carry of structure {self.structure} and "
                    f"returned one of structure {structure}.",
                    expected="the same structure.",
                    fix="return the same keys, lengths and types as in the initial carry.",
                    code="SG410",
                )
            )
        leaves = [jnp.asarray(leaf) for _, leaf in pairs]
        for slot, leaf in zip(self.slots, leaves, strict=True):
            if (leaf.shape, leaf.dtype) != (slot.given_shape, slot.given_dtype):
                raise ValueError(
                    explain(
                        f"{self._name} received {slot.path} of shape {slot.given_shape} and "
                        f"dtype {slot.given_dtype}, but returned shape {leaf.shape} and dtype "
                        f"{leaf.dtype}.",
                        expected="the same shape and dtype after each step.",
                        fix="give the initial carry that shape and dtype, or cast the returned "
                        "value: keras.ops.cast(value, dtype).",
                        code="SG410",
                    )
                )
        return leaves
