"""Eager execution: one thread per replica, run one at a time between collectives.

Replica 0 runs to its next collective or its end, then replica 1, and so on. The calling thread then
answers all requests together. With several processes, each runs its local replicas, and the calling
threads exchange the requests.

Source: TF 2.21 mirrored_run.py, _call_for_each_replica.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax

from stratagem import contexts as stack
from stratagem.devices.collectives.all_reduce import AllReduce
from stratagem.devices.context_mesh import is_explicit, on_one_device
from stratagem.devices.exact_integers import require_exact_integers
from stratagem.devices.mesh import Topology
from stratagem.devices.shards import replicas_span_processes
from stratagem.execution.communicator import SoleCommunicator
from stratagem.execution.context.replica import ReplicaContext
from stratagem.execution.eager.communicator import EagerCommunicator
from stratagem.execution.eager.meeting import CollectiveRequest, asked_by_all
from stratagem.execution.eager.state import EagerState
from stratagem.execution.summary.collector import Collector
from stratagem.execution.summary.host_callbacks import forward_summaries
from stratagem.execution.tracing.arguments import batch_of, true_batch
from stratagem.execution.tracing.build_writes import lost_writes, store_initial
from stratagem.execution.tracing.created_variables import initialize_created_variables
from stratagem.execution.tracing.errors import (
    apart,
    created_again,
    eager_abstract,
    eager_over_processes,
    eager_remote,
)
from stratagem.execution.tracing.functionalize import ReplicaScope
from stratagem.execution.tracing.lost_changes import call_with_copies
from stratagem.execution.tracing.returned_values import as_values, rebuilt
from stratagem.variables.initial_values import agree_on_initial_values
from stratagem.variables.regrouping import is_array, regroup, select_replica

if TYPE_CHECKING:
    from stratagem.contexts import StrategyParts


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
        self.all_reduce: AllReduce = strategy.cross_device_ops.all_reduce(strategy.topology)
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
        context = ReplicaContext(
            self._strategy, index, communicator, true_batch(self._batch, index)
        )
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
        self._baton.release()
        replica.resume.acquire()
        if self._abandoned:
            raise _Abandoned
        return replica.reply

    def merge(self, fn: Callable[..., Any], calls: list[Any]) -> list[Any]:
        """Makes one cross-replica call for all replicas, in the calling thread."""
        self.state.keep(self.scopes)
        # Devices of other processes are not addressable: all components stay on local ones.
        spans = self._topology.spans_processes
        merged_args, merged_kwargs = regroup(calls, None if spans else self._topology)
        result = fn(self._strategy, *merged_args, **merged_kwargs)
        return [select_replica(index, result) for index in range(self.num_replicas)]
