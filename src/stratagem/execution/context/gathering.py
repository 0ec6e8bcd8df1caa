"""`sg.all_gather`, which also works outside a strategy."""

from __future__ import annotations

from typing import Any

from stratagem.execution.context.replica import get_replica_context
from stratagem.messages import explain


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
