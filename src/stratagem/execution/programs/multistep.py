"""`run_steps`: batches are stacked, moved once, and looped over on the devices."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp

from stratagem.errors import InvalidArgumentError
from stratagem.execution.context.replica import get_replica_context
from stratagem.execution.eager.replicas import run_eagerly
from stratagem.execution.programs.carry import Carry, CarryingStep
from stratagem.execution.tracing.arguments import batch_arguments
from stratagem.execution.tracing.returned_values import as_values
from stratagem.input.iterator import DistributedIterator
from stratagem.input.placement import PlacedBatches
from stratagem.messages import explain
from stratagem.options import ReduceOp
from stratagem.variables.distributed import PerReplica

if TYPE_CHECKING:
    import numpy as np

    from stratagem.contexts import StrategyParts
    from stratagem.execution.programs.lockstep import Lockstep


def run_steps(
    strategy: StrategyParts,
    fn: Callable[[Any], Any],
    iterator: DistributedIterator,
    num_steps: int,
    *,
    reduce_op: ReduceOp | None,
    carry: object,
    eagerly: bool,
) -> Any:
    """Runs a replica function on the next batches of an iterator; see `Executor.run_steps`.

    With `eagerly`, steps run one by one, op by op. Raises InvalidArgumentError if results of
    different steps cannot be stacked.
    """
    if carry is not None:
        state = Carry(strategy, carry)
        step = CarryingStep(_OfBatch(fn), state.slots, state.structure, reduce_op)
        results = _run_all(strategy, step, iterator, num_steps, reduce_op, eagerly=eagerly)
        return state.take(), results
    step = _OfBatch(fn) if reduce_op is None else _ReducedStep(_OfBatch(fn), reduce_op)
    return _run_all(strategy, step, iterator, num_steps, reduce_op, eagerly=eagerly)


def _run_all(
    strategy: StrategyParts,
    function: Callable[[Any], Any],
    iterator: DistributedIterator,
    num_steps: int,
    reduce_op: ReduceOp | None,
    *,
    eagerly: bool,
) -> Any:
    results: list[Any] = []
    if eagerly:
        first = next(iterator)  # StopIteration at the end of the data
        for batch in itertools.chain([first], itertools.islice(iterator, num_steps - 1)):
            result = run_eagerly(strategy, function, (batch,), {})
            results.append(_mapped(_with_step_axis, result))
    else:
        for placed in iterator.take(num_steps):
            results.append(_run_compiled(strategy, function, placed))
    joined = _mapped(_join, *results)
    if reduce_op is None:
        return joined
    return _mapped(_of_any_replica, joined)


@dataclasses.dataclass(frozen=True)
class _OfBatch:
    """Calls a replica function with a batch, or with the parts of a batch that is a tuple."""

    fn: Callable[..., Any]

    def __call__(self, batch: Any, *carry: object) -> Any:
        is_taken_apart = type(batch) is tuple and not _takes(self.fn, *carry, batch)
        if is_taken_apart and _takes(self.fn, *carry, *batch):
            return self.fn(*carry, *batch)
        return self.fn(*carry, batch)


def _takes(fn: Callable[..., Any], *args: object) -> bool:
    """Returns True if a function accepts these arguments, or has no signature."""
    try:
        inspect.signature(fn).bind(*args)
    except TypeError:
        return False
    except ValueError:
        return True
    return True


@dataclasses.dataclass(frozen=True)
class _ReducedStep:
    """A replica function whose results are reduced over replicas.

    A dataclass instead of a closure, because equal ones share a program.
    """

    fn: Callable[[Any], Any]
    op: ReduceOp

    def __call__(self, batch: object) -> Any:
        context = get_replica_context()
        assert context is not None
        return context.all_reduce(self.op, as_values(self.fn(batch)))


def _run_compiled(strategy: StrategyParts, fn: Callable[[Any], Any], placed: PlacedBatches) -> Any:
    arguments = batch_arguments(placed)
    executor = cast("Lockstep", strategy.executor)
    if placed.hosts:
        return _mapped(_with_step_axis, executor.run_batches(fn, placed.hosts, arguments))
    program = executor.program(fn, arguments)
    if placed.num_steps == 1:
        result = program.run(arguments)
        return _mapped(_with_step_axis, result)
    result = program.run_many(arguments.split, arguments.shared)
    return _mapped(_true_rows, result)


def _mapped(fn: Callable[..., Any], *results: object) -> Any:
    return jax.tree.map(fn, *map(as_values, results), is_leaf=_is_per_replica)


def _is_per_replica(leaf: object) -> bool:
    return isinstance(leaf, PerReplica)


def _with_step_axis(leaf: object) -> Any:
    if isinstance(leaf, PerReplica):
        if leaf.stacked is not None and leaf.lengths is None:
            return PerReplica(stacked=leaf.stacked[:, None])
        parts = tuple(jnp.asarray(part)[None] for part in leaf.components)
        return PerReplica(objects=parts, lengths=leaf.lengths)
    return leaf[None] if isinstance(leaf, jax.Array) else leaf


def _true_rows(leaf: object) -> Any:
    """Removes padding rows, which are on axis 1 because steps are on axis 0."""
    if not isinstance(leaf, PerReplica) or leaf.lengths is None:
        return leaf
    return PerReplica(objects=leaf.parts(1), lengths=leaf.lengths)


def _join(*leaves: Any) -> Any:
    """Concatenates the steps of several runs."""
    if len(leaves) == 1 or not isinstance(leaves[0], PerReplica | jax.Array):
        return leaves[0]
    if not isinstance(leaves[0], PerReplica):
        return _concatenate(leaves, axis=0)
    if len({leaf.lengths for leaf in leaves}) > 1:  # lengths on all processes
        raise _cannot_be_stacked([_shapes(leaf) for leaf in leaves])
    if all(leaf.stacked is not None for leaf in leaves):
        return PerReplica(stacked=_concatenate([leaf.stacked for leaf in leaves], axis=1))
    columns = zip(*(leaf.components for leaf in leaves), strict=True)
    return PerReplica(objects=tuple(_concatenate(column, axis=0) for column in columns))


def _concatenate(parts: Iterable[jax.Array | np.ndarray], *, axis: int) -> Any:
    parts = list(parts)
    shapes = [part.shape[:axis] + part.shape[axis + 1 :] for part in parts]
    if len(set(shapes)) > 1:
        raise _cannot_be_stacked(shapes)
    return jnp.concatenate(parts, axis=axis)


def _shapes(leaf: PerReplica) -> Any:
    rest = leaf.components[0].shape[2:]
    return [(length, *rest) for length in leaf.lengths or (leaf.components[0].shape[1],)]


def _cannot_be_stacked(shapes: object) -> InvalidArgumentError:
    return InvalidArgumentError(
        explain(
            f"A step function returned arrays of different shapes in different steps: {shapes}.",
            expected="results of one shape, because run_steps stacks them.",
            fix="return sums or means instead of rows, drop the short batch, or call "
            "strategy.run for each batch.",
            code="SG410",
        )
    )


def _of_any_replica(leaf: object) -> Any:
    return leaf.components[0] if isinstance(leaf, PerReplica) else leaf
