"""`ReplicaContext`: collectives, replica ID and batch size inside a replica function."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from stratagem import contexts as stack
from stratagem.devices.local_updates import Islands
from stratagem.errors import InvalidArgumentError, check_type, explain, invalid
from stratagem.execution.communicator import Communicator, SoleCommunicator
from stratagem.options import ReduceOp
from stratagem.variables.distributed import IndexedSlices, is_indexed_slices

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts

# `ReplicaBatch`: true and padded row counts of a step's batch on each replica.


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """Row counts of a step's batch, as one replica sees them.

    True sizes are static, so a step with other sizes is another program. `size` is this replica's
    number of rows including padding, or None without a batch. `lengths` are the true rows of each
    replica, or None without padding.

    In a compiled step the batch of an island may depend on the island: `choices` are then the
    lengths that it may have, and `choice` the traced index of those it has.
    """

    size: int | None = None
    lengths: tuple[int, ...] | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    choice: Any = None

    @property
    def is_padded(self) -> bool:
        """True if any replica has padding."""
        return self.lengths is not None or bool(self.choices)

    @property
    def fraction(self) -> float | None:
        """This replica's fraction of all rows, where a step is only analyzed; else None."""
        return None

    @property
    def has_examples(self) -> bool:
        """True if any replica has a row."""
        return bool(self.choices or self.size) if self.lengths is None else any(self.lengths)

    def num_examples(self, replica_id: object) -> Any:
        """Returns the true rows of a replica: an int if known, otherwise a traced int32 scalar."""
        if self.choices:
            return jnp.asarray(self.choices, jnp.int32)[self.choice, replica_id]
        if self.lengths is None:
            return self.size
        if isinstance(replica_id, int):
            return self.lengths[replica_id]
        return jnp.asarray(self.lengths, jnp.int32)[replica_id]

    def global_num_examples(self, num_replicas: int) -> Any:
        """Returns the total true rows over all replicas, or None without a batch.

        A traced int32 scalar where the batch has choices.
        """
        if self.choices:
            return jnp.asarray([sum(lengths) for lengths in self.choices], jnp.int32)[self.choice]
        if self.lengths is not None:
            return sum(self.lengths)
        return None if self.size is None else self.size * num_replicas

    def mask(self, replica_id: object) -> Any:
        """Returns a boolean array of shape (size,), True for true rows; None without a batch."""
        if self.size is None:
            return None
        return jnp.arange(self.size) < self.num_examples(replica_id)

    def alternatives(self) -> list[ReplicaBatch]:
        """Returns the batches that this one may be, in the order of `choice`; itself if known."""
        if not self.choices:
            return [self]
        return [ReplicaBatch(size=self.size, lengths=lengths) for lengths in self.choices]

    def of_island(self, islands: Islands, island_id: Any) -> ReplicaBatch:
        """Returns the batch of one island, whose replicas are counted from 0."""
        if self.lengths is None:
            return self
        parts = [tuple(self.lengths[one] for one in members) for members in islands.members]
        if isinstance(island_id, int):
            return ReplicaBatch(size=self.size, lengths=parts[island_id])
        choices = tuple(dict.fromkeys(parts))
        if len(choices) == 1:
            return ReplicaBatch(size=self.size, lengths=choices[0])
        places = jnp.asarray([choices.index(part) for part in parts], jnp.int32)
        return ReplicaBatch(size=self.size, choices=choices, choice=places[island_id])


class ReplicaContext:
    """One replica of a step, inside the function passed to `Strategy.run`.

    Args:
        strategy: strategy that runs the step.
        replica_id: int in eager mode, traced int32 scalar in a compiled step.
        communicator: collectives of this replica; None for a single replica.
        batch: rows of this step; None for no batch.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     context = sg.get_replica_context()
        ...     return context.all_reduce("sum", x) / context.num_replicas_in_sync
        >>> strategy.run(step, args=(np.float32(10),))
        PerReplica[10.0 | 10.0]

    Source: TF 2.21 distribute_lib.py, ReplicaContext.
    """

    def __init__(
        self,
        strategy: StrategyParts,
        replica_id: object = 0,
        communicator: Communicator | None = None,
        batch: ReplicaBatch | None = None,
    ) -> None:
        self._strategy = strategy
        self._replica_id = replica_id
        self._communicator = communicator or SoleCommunicator()
        self._batch = batch or ReplicaBatch()

    @property
    def strategy(self) -> Any:
        """The strategy that runs this step."""
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> Any:
        """ID of this replica, from 0: a traced scalar in a compiled step, an int in eager mode."""
        return self._replica_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas in this step."""
        return self._communicator.num_replicas

    @property
    def communicator(self) -> Communicator:
        """Collectives of this replica; internal."""
        return self._communicator

    @property
    def batch(self) -> ReplicaBatch:
        """Rows of this step; internal."""
        return self._batch

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """Devices of the strategy (TensorFlow 1.x)."""
        strategy: Any = self._strategy
        return strategy.extended.worker_devices

    @property
    def num_examples(self) -> Any:
        """Number of true examples in this replica's batch, or None without a batch."""
        return self._batch.num_examples(self._replica_id)

    @property
    def example_mask(self) -> Any:
        """Boolean array, True for true examples of this replica's batch; None without a batch."""
        return self._batch.mask(self._replica_id)

    @property
    def global_num_examples(self) -> Any:
        """Number of true examples in this step over all replicas, or None without a batch."""
        return self._batch.global_num_examples(self.num_replicas_in_sync)

    @property
    def island(self) -> ReplicaContext:
        """The context of the replicas that train in lockstep with this one; internal.

        Made anew each time: its values belong to the trace of the caller, such as a `jax.jit`.
        It is itself unless replicas train apart, and for the context of an island.
        """
        islands = self._strategy.islands
        if islands is None or self.num_replicas_in_sync != islands.num_replicas:
            return self
        replica_id = self.replica_id_in_sync_group
        batch = self._batch.of_island(islands, replica_id // islands.size)
        communicator = self._communicator.among(islands.members)
        return ReplicaContext(self._strategy, replica_id % islands.size, communicator, batch)

    def __repr__(self) -> str:
        return f"ReplicaContext({self._strategy}, replica_id_in_sync_group={self._replica_id})"

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls a function once for all replicas, in cross-replica context.

        Call in replica context.

        Args:
            merge_fn: called as `merge_fn(strategy, *args, **kwargs)`, with a `PerReplica` for each
                array.
            args: arguments, pytrees of local arrays.
            kwargs: keyword arguments, likewise.

        Returns:
            The result of `merge_fn`; this replica's component of each `PerReplica`.

        Raises:
            TypeError: `merge_fn` is not callable.
            RuntimeError: in cross-replica context.

        Example:
            >>> sg.get_replica_context().merge_call(
            ...     lambda strategy, v: strategy.reduce("SUM", v, axis=None), args=(2.0,)
            ... )
            Array(2., dtype=float32, weak_type=True)

        Source: TF 2.21 distribute_lib.py, ReplicaContextBase.merge_call.
        """
        fix = "pass the function itself and its arguments in `args`."
        check_type("merge_fn", merge_fn, callable, "a function", fix)
        self._require_current("merge_call")

        def merged(strategy: StrategyParts, *call_args: object, **call_kwargs: object) -> Any:
            with stack.push(stack.FrameKind.MERGE, strategy, self):
                return merge_fn(strategy, *call_args, **call_kwargs)

        return self._communicator.merge(self._strategy, merged, args, kwargs or {})

    def all_reduce(self, reduce_op: ReduceOp | str, value: object, options: object = None) -> Any:
        """Reduces a value over replicas, on every replica. Call in replica context.

        Differentiable: the gradient of SUM is the sum of the incoming gradients over replicas, the
        gradient of MEAN their mean.

        Args:
            reduce_op: "sum" or "mean".
            value: pytree of local arrays, each of one shape and dtype on all replicas. For
                `IndexedSlices` only the rows are sent, and replicas may have different ones.
            options: accepted for compatibility and ignored.

        Returns:
            The same pytree, reduced; SUM keeps the dtype, MEAN of integers is a float. Rows with
            equal indices are summed.

        Raises:
            ValueError: unknown op.
            InvalidArgumentError: shapes that differ between replicas (detected in eager mode).
            RuntimeError: in cross-replica context; use `strategy.reduce`.

        Example:
            >>> sg.get_replica_context().all_reduce("sum", 2.0)
            2.0

        Source: TF 2.21 distribute_lib.py, ReplicaContext.all_reduce.
        """
        op = ReduceOp.parse(reduce_op)
        self._require_current("all_reduce", "strategy.reduce")
        return jax.tree.map(
            lambda leaf: self._reduce_leaf(op, leaf), value, is_leaf=is_indexed_slices
        )

    def _reduce_leaf(self, op: ReduceOp, leaf: object) -> Any:
        if isinstance(leaf, IndexedSlices):
            return self._communicator.all_reduce_slices(op, leaf).combined()
        if is_key(leaf):
            raise random_keys_error("all_reduce")
        return self._communicator.all_reduce(op, leaf)

    def all_gather(self, value: object, axis: int, options: object = None) -> Any:
        """Concatenates a value over replicas, on every replica. Call in replica context.

        Leaves out the padding rows of a short batch. Differentiable: each replica receives the sum
        over replicas of the gradient slices of its own part.

        Args:
            value: pytree of local arrays, shape (..., n_i, ...), n_i of replica i at `axis`.
            axis: int, -rank <= axis < rank; the other sizes must be equal on all replicas.
            options: accepted for compatibility and ignored.

        Returns:
            The same pytree; size sum(n_i) at `axis`, in replica order; dtype unchanged.

        Raises:
            RuntimeError: in cross-replica context; use `strategy.gather`.
            ValueError: rank 0, or `axis` out of range.
            NotImplementedError: `IndexedSlices`.

        Example:
            >>> sg.get_replica_context().all_gather(jax.numpy.ones((2, 3)), axis=0).shape
            (2, 3)

        Source: TF 2.21 distribute_lib.py, ReplicaContext.all_gather.
        """
        self._require_current("all_gather", "strategy.gather")
        return jax.tree.map(
            lambda leaf: self._gather_leaf(leaf, axis), value, is_leaf=is_indexed_slices
        )

    def _gather_leaf(self, leaf: object, axis: int) -> Any:
        check_not_slices(leaf, "all_gather")
        leaf = jnp.asarray(leaf)
        axis = check_axis(axis, leaf.ndim, "all_gather")
        batch = self._batch
        padded = axis == 0 and batch.is_padded and leaf.shape[0] == batch.size
        lengths = batch.lengths if padded else None
        if is_key(leaf):
            data = self._communicator.all_gather(jax.random.key_data(leaf), axis, lengths)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return self._communicator.all_gather(leaf, axis, lengths)

    def _require_current(self, method: str, instead: str = "strategy.run") -> None:
        current = get_replica_context()
        is_default = stack.current_frame() is None and self._strategy is stack.get_strategy()
        if current is self or is_default:
            return
        where = "in cross-replica context" if current is None else "outside its replica function"
        fix = f"use {instead}" if current is None else "use sg.get_replica_context()"
        raise RuntimeError(
            explain(
                f"ReplicaContext.{method} was called {where}.",
                expected="replica context, inside the function passed to `strategy.run`.",
                fix=f"{fix} here.",
                code="SG405",
            )
        )


def check_not_slices(value: object, method: str) -> None:
    """Raises NotImplementedError for `IndexedSlices`, which have no axis to concatenate."""
    if isinstance(value, IndexedSlices):
        raise NotImplementedError(
            explain(
                f"{method} received IndexedSlices.",
                expected="arrays.",
                fix="reduce the slices over replicas (axis=None), or convert them with to_dense().",
            )
        )


def is_key(value: object) -> bool:
    """Returns True for an array of JAX random keys."""
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def random_keys_error(method: str) -> TypeError:
    """Returns the error for random keys in a sum or mean."""
    return TypeError(
        explain(
            f"{method} received random keys, which cannot be added.",
            expected="numbers; strategy.reduce accepts the MEAN of keys that are equal everywhere.",
            fix="take one replica's key with strategy.local_results, or all with strategy.gather.",
        )
    )


def check_axis(axis: Any, ndim: int, method: str) -> int:
    """Returns an array axis counted from the front; raises if it is invalid."""
    check_type("axis", axis, int, "an int", "pass one array axis, such as 0.", owner=method)
    if ndim == 0:
        raise invalid(
            f"{method} received a scalar and axis={axis}.",
            expected="an array of rank 1 or more.",
            fix="add an axis to the value (value[None]), or reduce with axis=None.",
        )
    if not -ndim <= axis < ndim:
        raise invalid(
            f"{method} received axis={axis}, out of range for a value of rank {ndim}.",
            expected=f"{-ndim} <= axis < {ndim}.",
            fix="count the axes of one component, without the replica axis.",
        )
    return axis % ndim


def check_equal_shapes(shapes: list[tuple[int, ...]], method: str) -> None:
    """Raises InvalidArgumentError if the parts of the replicas differ in shape."""
    if len(set(shapes)) > 1:
        raise InvalidArgumentError(
            explain(
                f"{method} received parts with shapes {shapes}.",
                expected="the same shape on all replicas.",
                fix="also reduce over axis 0 (axis=0), which accepts parts of unequal length.",
                code="SG408",
            )
        )


def get_replica_context() -> ReplicaContext | None:
    """Returns the context of the current replica. Call anywhere.

    Returns:
        The context in a replica function; the default strategy's context, replica 0 of 1, outside
        every scope; None in cross-replica context.

    Example:
        >>> sg.get_replica_context().num_replicas_in_sync
        1

    Source: TF 2.21 distribution_strategy_context.py, get_replica_context.
    """
    frame = stack.current_frame()
    if frame is None:
        return ReplicaContext(stack.get_strategy())
    return frame.replica if frame.kind is stack.FrameKind.REPLICA else None


# `sg.all_gather`, which also works outside a strategy.


def all_gather(value: object, axis: int = 0) -> Any:
    """Concatenates a value over replicas, on every replica. Call in replica context.

    Short for `sg.get_replica_context().all_gather(value, axis)`. Outside every scope there is one
    replica, and the value is returned unchanged. Differentiable, so losses over pairs of examples
    can use the examples of all replicas.

    Args:
        value: pytree of local arrays, shape (..., n_i, ...), n_i of replica i at `axis`.
        axis: int, -rank <= axis < rank; the other sizes must be equal on all replicas.

    Returns:
        The same pytree; size sum(n_i) at `axis`, in replica order, without padding rows; dtype
        unchanged.

    Raises:
        RuntimeError: in cross-replica context; use `strategy.gather`.
        ValueError: rank 0, or `axis` out of range.
        NotImplementedError: `IndexedSlices`.

    Example:
        >>> strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> x = strategy.distribute_values_from_function(
        ...     lambda context: jax.numpy.ones(2) * context.replica_id_in_sync_group
        ... )
        >>> strategy.run(sg.all_gather, args=(x,))
        PerReplica[[0. 0. 1. 1.] | [0. 0. 1. 1.]]

    Source: TF 2.21 distribute_lib.py, ReplicaContext.all_gather.
    """
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            explain(
                "sg.all_gather was called in cross-replica context.",
                expected="replica context, inside the function passed to `strategy.run`.",
                fix="use strategy.gather(value, axis=0) here.",
                code="SG405",
            )
        )
    return context.all_gather(value, axis)
