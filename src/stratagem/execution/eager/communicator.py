"""`EagerCommunicator`: collectives between the replica threads of an eager session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem.devices.collectives.all_reduce import AllReduce
from stratagem.execution.communicator import Communicator, SoleCommunicator
from stratagem.execution.context.replica import check_equal_shapes
from stratagem.execution.eager.meeting import Answer, CollectiveRequest, by_group, self_transposed
from stratagem.messages import explain
from stratagem.options import ReduceOp
from stratagem.variables.distributed import Mirrored, PerReplica
from stratagem.variables.regrouping import is_array


class EagerReplica(Protocol):
    """One replica of a session."""

    replica_id: int


class EagerSession(Protocol):
    """One eager call for all replicas."""

    all_reduce: AllReduce

    def meet(self, replica: Any, request: CollectiveRequest) -> Any:
        """Blocks until all replicas have made requests; returns the reply."""
        ...

    def merge(self, fn: Callable[..., Any], calls: list[Any]) -> list[Any]:
        """Makes one cross-replica call for all replicas."""
        ...


class EagerCommunicator(Communicator):
    """Collectives between the replica threads of an eager session."""

    def __init__(
        self,
        session: EagerSession,
        replica: EagerReplica,
        device: object,
        groups: tuple[tuple[int, ...], ...],
    ) -> None:
        self._session = session
        self._replica = replica
        self._device = device
        self._groups = groups
        self._place = next(
            group.index(replica.replica_id) for group in groups if replica.replica_id in group
        )

    @property
    def num_replicas(self) -> int:
        """Number of replicas in the group."""
        return len(self._groups[0])

    def among(self, groups: tuple[tuple[int, ...], ...], *, packs: bool = False) -> Communicator:
        """Returns the communicator of this replica's group, which sends nothing to pack."""
        if len(groups[0]) == 1:
            return SoleCommunicator()
        return EagerCommunicator(self._session, self._replica, self._device, groups)

    def _meet(self, kind: str, value: object, answer: Answer) -> Any:
        """Returns this replica's part of the answer to its group."""

        def of_groups(values: list[Any]) -> list[Any]:
            return by_group(self._groups, answer, values)

        kind = kind if len(self._groups) == 1 else f"{kind} among {self._groups}"
        return self._session.meet(self._replica, CollectiveRequest(kind, value, of_groups))

    def all_reduce(self, op: ReduceOp, value: object) -> Any:
        """Returns a sum or mean over replicas; differentiable."""
        return self._all_reduce(op, value, are_gradients=False)

    def all_reduce_many(self, op: ReduceOp, values: Sequence[Any]) -> list[Any]:
        """Reduces the values one by one."""
        return [self._all_reduce(op, value, are_gradients=True) for value in values]

    def _all_reduce(self, op: ReduceOp, value: object, *, are_gradients: bool) -> Any:
        def answer(values: list[Any]) -> list[Any]:
            check_equal_shapes([value.shape for value in values], "all_reduce")
            host = [np.asarray(value) for value in values]
            result = self._session.all_reduce.parts(op, host, are_gradients=are_gradients)
            return [result] * len(values)

        def reduce(value: object) -> Any:
            total = self._meet(f"all_reduce({op.value})", value, answer)
            return jax.device_put(total, self._device)

        return self_transposed(reduce)(jnp.asarray(value))

    def all_gather(self, value: object, axis: int, lengths: tuple[int, ...] | None) -> Any:
        """Returns a concatenation over replicas; differentiable."""
        sizes: list[int] = []

        def gather(value: object) -> Any:
            def answer(values: list[Any]) -> list[Any]:
                self._check_gatherable(values, axis)
                host = [np.asarray(part) for part in values]
                all_sizes = [part.shape[axis] for part in host]
                joined = np.concatenate(host, axis=axis)
                return [(joined, all_sizes)] * len(values)

            joined, all_sizes = self._meet("all_gather", value, answer)
            sizes[:] = all_sizes
            return jax.device_put(joined, self._device)

        @jax.custom_vjp
        def differentiable(value: object) -> Any:
            return gather(value)

        def backward(_: None, incoming: object) -> tuple[Any]:
            total = self.all_reduce(ReduceOp.SUM, incoming)
            start = sum(sizes[: self._place])
            stop = start + sizes[self._place]
            return (jax.lax.slice_in_dim(total, start, stop, axis=axis),)

        differentiable.defvjp(lambda value: (gather(value), None), backward)
        return differentiable(jnp.asarray(value))

    def all_to_all(self, value: jax.Array) -> jax.Array:
        """Exchanges rows with the other replicas."""

        def answer(values: list[Any]) -> list[Any]:
            check_equal_shapes([value.shape for value in values], "all_to_all")
            return list(np.stack([np.asarray(value) for value in values], axis=1))

        return jax.device_put(self._meet("all_to_all", value, answer), self._device)

    def merge(
        self,
        strategy: object,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls a function once in cross-replica context, in the calling thread."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((args, kwargs))):
            raise RuntimeError(
                explain(
                    "merge_call was called in eager mode in a function that is being "
                    "differentiated.",
                    expected="concrete values, because an eager merge_call runs immediately.",
                    fix="use all_reduce or all_gather, which are differentiable, or compile "
                    "the step.",
                )
            )
        request = CollectiveRequest(
            "merge_call", (args, kwargs), lambda calls: self._session.merge(fn, calls)
        )
        reply = self._session.meet(self._replica, request)
        return jax.tree.map(
            lambda leaf: jax.device_put(leaf, self._device) if is_array(leaf) else leaf,
            reply,
            is_leaf=lambda leaf: isinstance(leaf, PerReplica | Mirrored),
        )

    def _check_gatherable(self, values: list[Any], axis: int) -> None:
        rest = [value.shape[:axis] + value.shape[axis + 1 :] for value in values]
        check_equal_shapes(rest, "all_gather (the gathered axis left out)")
