"""Eager execution: one thread per replica, run one at a time between collectives.

Replica 0 runs to its next collective or its end, then replica 1, and so on. The calling thread then
answers all requests together. With several processes, each runs its local replicas, and the calling
threads exchange the requests.

Source: TF 2.21 mirrored_run.py, _call_for_each_replica.
"""

from __future__ import annotations

import contextvars
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from stratagem import contexts as stack
from stratagem.devices.mesh import Topology, is_explicit, on_one_device
from stratagem.devices.shards import replica_copy, replicas_span_processes, require_exact_integers
from stratagem.errors import explain
from stratagem.execution.communicator import Communicator, MeshCommunicator, SoleCommunicator
from stratagem.execution.replica_context import ReplicaContext, check_equal_shapes
from stratagem.execution.summary.collector import Collector
from stratagem.execution.summary.kinds import forward_summaries
from stratagem.execution.tracing.arguments import batch_of, true_batch
from stratagem.execution.tracing.errors import (
    apart,
    call_with_copies,
    created_again,
    disagreement,
    eager_abstract,
    eager_over_processes,
    eager_remote,
    foreign_variable,
)
from stratagem.execution.tracing.functionalize import ReplicaScope, initialize_created_variables
from stratagem.execution.tracing.tracer import as_values, lost_writes, rebuilt, store_initial
from stratagem.group.current import current_group
from stratagem.options import ReduceOp
from stratagem.variables.components import agree_on_initial_values
from stratagem.variables.distributed import (
    is_array,
    is_distributed,
    regroup,
    select_replica,
)
from stratagem.variables.layouts import put_stored, require_layouts_used, store_of
from stratagem.variables.registry import VariableKind, home_of

if TYPE_CHECKING:
    import keras

    from stratagem.contexts import StrategyParts

# Variables during eager execution: each replica's reads, and merging of the replicas' writes.


class EagerState:
    """Reads and writes of a strategy's variables by its eager replicas."""

    def __init__(self, strategy: StrategyParts) -> None:
        self._strategy = strategy
        self._topology: Topology = strategy.topology
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._before: dict[int, tuple[Any, Any]] = {}

    def reader(self, replica_id: int) -> Callable[[Any], Any]:
        """Returns a function that maps a variable to this replica's part of it."""

        def read(variable: keras.Variable) -> Any:
            home = home_of(variable)
            if home is None:
                return None
            if home.strategy is not self._strategy:
                raise foreign_variable(variable, home.strategy, self._strategy)
            stored = self._stored(variable) if variable.has_value else None
            if stored is None:
                return None
            if not isinstance(stored, jax.Array):  # fetched from another process
                return jnp.asarray(stored)
            if home.kind is VariableKind.PLAIN and self._topology.groups is None:
                return stored
            part = replica_copy(stored, self._topology, replica_id)
            return part[0] if home.kind is VariableKind.ON_READ else part

        return read

    def _stored(self, variable: keras.Variable) -> Any:
        """Returns a copy for each replica; offloaded values are copied once per value."""
        if store_of(variable) is None:
            return variable.storage
        copied, copies = self._copies.get(id(variable), (None, None))
        if copied is not variable.stored:
            copies = variable.storage
            self._copies[id(variable)] = (variable.stored, copies)
        return copies

    def keep(self, scopes: list[ReplicaScope]) -> None:
        """Moves the writes of all replicas, in order, into the variables and clears the scopes."""
        written: dict[int, Any] = {}
        for scope in scopes:
            written.update(scope.writes)
        require_layouts_used(self._strategy.placement.layouts, written.values())
        for key, variable in written.items():
            home = home_of(variable)
            if home is not None and home.strategy is not self._strategy:
                raise foreign_variable(variable, home.strategy, self._strategy)
            if home is not None and not variable.has_value:
                continue  # created in this call, which will be rerun
            if key not in self._before:
                self._before[key] = variable, variable.value if home is None else variable.storage
            if home is not None and home.kind is VariableKind.ON_READ:
                self._keep_components(variable, scopes, key)
            else:
                self._keep_copy(variable, scopes, key, is_stored=home is not None)
        for scope in scopes:
            scope.forget()

    def restore(self) -> None:
        """Resets variables to their values before the call, which is about to be rerun."""
        for variable, value in self._before.values():
            if home_of(variable) is None:
                variable.assign(value)
            else:
                variable.storage = value

    def send(self, scope: ReplicaScope) -> None:
        """Sends one replica's outputs to the remote variables; they are equal on all replicas."""
        for prepare in scope.preparations:
            prepare()
        if scope.sent:
            self._strategy.placement.remote.send(scope.sent)

    def _keep_components(
        self, variable: keras.Variable, scopes: list[ReplicaScope], key: int
    ) -> None:
        parts = [
            scope.state_mapping[key]
            if key in scope.writes
            else replica_copy(variable.storage, self._topology, index)[0]
            for index, scope in zip(self._topology.local_replica_ids, scopes, strict=True)
        ]
        variable.storage = self._topology.stack(
            [jnp.asarray(part, variable.dtype) for part in parts]
        )

    def _same_everywhere(self, value: object, same: bool) -> bool:
        """Returns True if the replicas of all processes agree; `same` is the local answer."""
        if not self._topology.spans_processes:
            return same
        group = current_group()
        assert group is not None
        received = group.exchange("an assigned value", (same, np.asarray(value)))
        return all(
            theirs and np.array_equal(received[0][1], v, equal_nan=True) for theirs, v in received
        )

    def _keep_copy(
        self, variable: Any, scopes: list[ReplicaScope], key: int, *, is_stored: bool
    ) -> None:
        values = [scope.state_mapping.get(key) if key in scope.writes else None for scope in scopes]
        first = values[0] if values[0] is not None else next(v for v in values if v is not None)
        if any(key in scope.unproven for scope in scopes):
            same = all(
                value is not None
                and np.array_equal(np.asarray(first), np.asarray(value), equal_nan=True)
                for value in values
            )
            if not self._same_everywhere(first, same):
                raise disagreement(variable, self._strategy)
        value = jnp.asarray(first, variable.dtype)
        if is_stored:
            variable.storage = put_stored(variable, jax.device_get(value), self._topology)
        else:
            variable.assign(value)


# `EagerCommunicator`: collectives between the replica threads of an eager session.


class EagerCommunicator(Communicator):
    """Collectives between the replica threads of an eager session."""

    def __init__(
        self,
        session: _Session,
        replica: _Replica,
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
            result = self._session.in_a_step.parts(op, host, are_gradients=are_gradients)
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
            is_leaf=is_distributed,
        )

    def _check_gatherable(self, values: list[Any], axis: int) -> None:
        rest = [value.shape[:axis] + value.shape[axis + 1 :] for value in values]
        check_equal_shapes(rest, "all_gather (the gathered axis left out)")


_Step = Callable[..., Any]


def run_eagerly(
    strategy: StrategyParts, fn: _Step, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls a function once per replica, op by op, and returns the regrouped result."""
    if strategy.topology.is_abstract:
        raise eager_abstract(strategy)
    if strategy.placement.is_remote:
        raise eager_remote()
    if replicas_span_processes(strategy.topology):
        raise eager_over_processes()
    if strategy.topology.devices is None:
        return _run_plainly(strategy, fn, args, kwargs)
    agree_on_initial_values(strategy.variables, strategy.topology)
    session = _Session(strategy, fn, args, kwargs)
    results = session.run()
    if strategy.variables.uninitialized():
        session, results = _run_again(strategy, session)
    session.state.keep(session.scopes)
    session.state.send(session.scopes[0])
    if session.summaries is not None:
        forward_summaries(session.summaries.summaries, session.summaries.values)
    values = [as_values(rebuilt(result)) for result in results]  # after the servers' update
    return rebuilt(regroup(values, strategy.topology))


def _run_again(strategy: StrategyParts, first: _Session) -> tuple[_Session, list[Any]]:
    """Reruns a call that created variables; once more if a layer's build assigned to them."""
    first.state.restore()
    initialize_created_variables(strategy)
    agree_on_initial_values(strategy.variables, strategy.topology)
    session = first.anew()
    results = session.run()
    if created := strategy.variables.uninitialized():
        raise created_again(created[0])
    scope = first.scopes[0]
    variables = [variable for variable, _ in scope.early]
    lost = lost_writes(variables, scope.num_writes, session.scopes[0].num_writes)
    if not lost:
        return session, results
    session.state.restore()
    for place in lost.values():  # only the first replica builds layers
        store_initial(variables[place], scope.early[place][1])
    session = first.anew()
    return session, session.run()


def _run_plainly(
    strategy: StrategyParts, fn: _Step, args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Runs the function as plain Keras would, under the default strategy."""
    batch = batch_of(args, kwargs, 1)
    context = ReplicaContext(strategy, 0, SoleCommunicator(), batch)
    with jax.disable_jit(), stack.push(stack.FrameKind.REPLICA, strategy, context):
        return rebuilt(as_values(fn(*args, **kwargs)))


_END = "the end of the function"


class _Abandoned(BaseException):
    """Ends a replica's thread after another replica failed."""


class _Replica:
    """The thread of one replica and its state."""

    def __init__(self, replica_id: int, place: int) -> None:
        self.replica_id = replica_id
        self.place = place  # index among local replicas
        self.resume = threading.Semaphore(0)
        self.request: CollectiveRequest | None = None
        self.reply: Any = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False


def _put(value: Any, device: Any) -> jax.Array:
    return jax.device_put(on_one_device(value) if is_explicit(value) else value, device)


class _Session:
    """One eager call for all replicas."""

    def __init__(
        self, strategy: StrategyParts, fn: _Step, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._strategy = strategy
        self._fn = fn
        self.num_replicas: int = strategy.num_replicas_in_sync
        self._topology: Topology = strategy.topology
        self.in_a_step: MeshCommunicator = strategy.cross_device_ops.communicator(strategy.topology)
        self._arguments = (tuple(args), kwargs)
        self._batch = batch_of(args, kwargs, self.num_replicas)
        self._baton = threading.Semaphore(0)
        self._abandoned = False
        local_ids = self._topology.local_replica_ids
        self._replicas = [_Replica(index, place) for place, index in enumerate(local_ids)]
        self.state = EagerState(strategy)
        self.summaries: Collector | None = None  # of replica 0
        self.scopes: list[ReplicaScope] = [
            ReplicaScope(self.state.reader(index), strategy.placement.remote) for index in local_ids
        ]

    def anew(self) -> _Session:
        """Returns a new session for the same call."""
        return _Session(self._strategy, self._fn, *self._arguments)

    def run(self) -> list[Any]:
        if self.num_replicas == 1:  # a single replica needs no thread
            return [self._call(self._replicas[0])]
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_replica, replica),
                name=f"stratagem-replica-{replica.replica_id}",
                daemon=True,
            )
            for replica in self._replicas
        ]
        for thread in threads:
            thread.start()
        try:
            self._pass_baton()
        finally:
            self._abandoned = True
            for replica, thread in zip(self._replicas, threads, strict=True):
                if not replica.is_done:
                    replica.resume.release()
                thread.join()
        return [replica.result for replica in self._replicas]

    def _pass_baton(self) -> None:
        while True:
            for replica in self._replicas:
                replica.request = None
                replica.resume.release()
                self._baton.acquire()
                if replica.error is not None:
                    raise replica.error
            requests = [replica.request for replica in self._replicas]
            if all(replica.is_done for replica in self._replicas):
                if self._topology.spans_processes:  # replicas of other processes may still run
                    self._check_ended(requests)
                return
            self._answer(requests)

    def _answer(self, requests: list[CollectiveRequest | None]) -> None:
        own_kinds = [request.kind if request else _END for request in requests]
        own_values = [request.value if request else None for request in requests]
        kinds, values = own_kinds, own_values
        if self._topology.spans_processes:
            kinds, values = asked_by_all(own_kinds, own_values)
        if len(set(kinds)) > 1 or requests[0] is None:
            raise apart(kinds)
        replies = requests[0].answer(values)
        for replica in self._replicas:
            replica.reply = replies[replica.replica_id]

    def _check_ended(self, requests: list[CollectiveRequest | None]) -> None:
        kinds, _ = asked_by_all([_END] * len(requests), [None] * len(requests))
        if set(kinds) != {_END}:
            raise apart(kinds)

    def _run_replica(self, replica: _Replica) -> None:
        replica.resume.acquire()
        try:
            if not self._abandoned:
                replica.result = self._call(replica)
        except _Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - raised again in the calling thread
            replica.error = error
        finally:
            replica.is_done = True
            self._baton.release()

    def _call(self, replica: _Replica) -> Any:
        index, place = replica.replica_id, replica.place
        device = self._topology.devices[index] if self._topology.devices else None
        alone = self.num_replicas == 1
        everyone = (tuple(range(self.num_replicas)),)
        communicator = (
            SoleCommunicator() if alone else EagerCommunicator(self, replica, device, everyone)
        )
        batch = true_batch(self._batch, index)
        context = ReplicaContext(self._strategy, index, communicator, batch)
        self.scopes[place].replica = index, self.num_replicas, batch
        summaries = Collector()
        if index == 0:
            self.summaries = summaries
        with (
            jax.default_device(device),
            jax.disable_jit(),
            stack.push(stack.FrameKind.REPLICA, self._strategy, context),
            self.scopes[place],
            summaries,
        ):
            args, kwargs = self._local_arguments(place, device)
            result = call_with_copies(self._fn, args, kwargs)
            return as_values(result, self.scopes[place].is_late)

    def _local_arguments(self, place: int, device: object) -> Any:
        selected = select_replica(place, self._arguments)
        require_exact_integers(jax.tree.leaves(selected), lambda _: "An argument")
        return jax.tree.map(lambda leaf: _put(leaf, device) if is_array(leaf) else leaf, selected)

    def meet(self, replica: _Replica, request: CollectiveRequest) -> Any:
        """Blocks a replica's thread until all replicas have made requests; returns the reply."""
        replica.request = request
        # Other replicas call the same layers meanwhile, which forget the losses before.
        sets = self.scopes[replica.place].ids_of_losses.values()
        own = [(one, set(one)) for one in sets]
        self._baton.release()
        replica.resume.acquire()
        if self._abandoned:
            raise _Abandoned
        for one, ids in own:
            one.clear()
            one.update(ids)
        return replica.reply

    def merge(self, fn: Callable[..., Any], calls: list[Any]) -> list[Any]:
        """Makes one cross-replica call for all replicas, in the calling thread."""
        self.state.keep(self.scopes)
        # Devices of other processes are not addressable: all components stay on local ones.
        spans = self._topology.spans_processes
        merged_args, merged_kwargs = regroup(calls, None if spans else self._topology)
        result = fn(self._strategy, *merged_args, **merged_kwargs)
        return [select_replica(index, result) for index in range(self.num_replicas)]


# Exchange of collective requests between the eager replicas of several processes.


Answer = Callable[[list[Any]], list[Any]]


@dataclasses.dataclass
class CollectiveRequest:
    """A collective call of one replica; `kind` is compared between replicas."""

    kind: str
    value: Any
    answer: Answer  # maps all replicas' values to results


def by_group(groups: Sequence[Sequence[int]], answer: Answer, values: list[Any]) -> list[Any]:
    """Returns the replies to all replicas where each group of them gets an answer of its own."""
    replies: list[Any] = [None] * len(values)
    for group in groups:
        answers = answer([values[replica_id] for replica_id in group])
        for replica_id, reply in zip(group, answers, strict=True):
            replies[replica_id] = reply
    return replies


def asked_by_all(kinds: list[str], values: list[Any]) -> tuple[list[str], list[Any]]:
    """Returns the calls and values of all replicas, or no values if the calls differ.

    A collective of all processes. Only arrays are exchanged; other objects are assumed equal.
    """
    group = current_group()
    assert group is not None
    own: list[Any] = []
    for kind, value in zip(kinds, values, strict=True):
        leaves = [leaf for leaf in jax.tree.leaves(value) if is_array(leaf)]
        own.append((kind, [np.asarray(leaf) for leaf in leaves]))
    rows = [row for part in group.exchange("a meeting of eager replicas", own) for row in part]
    all_kinds = [kind for kind, _ in rows]
    if len(set(all_kinds)) > 1:
        return all_kinds, []
    own_leaves, structure = jax.tree.flatten(values[0])
    all_values: list[Any] = []
    for _, arrays in rows:
        remaining = iter(arrays)
        leaves = [next(remaining) if is_array(leaf) else leaf for leaf in own_leaves]
        all_values.append(jax.tree.unflatten(structure, leaves))
    return all_kinds, all_values


def self_transposed(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Makes a reduction differentiable: its gradient is the same reduction of the cotangent."""

    @jax.custom_vjp
    def differentiable(value: object) -> Any:
        return reduce(value)

    differentiable.defvjp(
        lambda value: (reduce(value), None), lambda _, incoming: (reduce(incoming),)
    )
    return differentiable
