"""Worker process: runs the functions that the coordinator sends, one at a time."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from stratagem.contexts import get_strategy, in_cross_replica_context
from stratagem.errors import explain
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import Listener, Request
from stratagem.group.transport.wire import Message
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.cluster_plan import RemoteStateStrategy
from stratagem.parameter_server.coordinator.remote_value import map_structure
from stratagem.parameter_server.coordinator.shipping import (
    MAX_UNANSWERED,
    Ended,
    SentCall,
    calls_in,
    failed_message,
    pack_ended,
)
from stratagem.parameter_server.server.shards import UpdateMode
from stratagem.resources import Closing

if TYPE_CHECKING:
    import keras


_AGAIN = Message("again")  # the function did not run: send it again
# Grace period for a function that is about to finish; its result is discarded anyway.
_CLOSE_S = 0.2


class _CurrentWorker(threading.local):
    worker_index: int | None = None


_current: _CurrentWorker = _CurrentWorker()


def get_current_worker_index() -> int:
    """Returns the index of the worker that runs the function. Call in a scheduled function.

    Returns:
        Index of the worker, from 0.

    Raises:
        RuntimeError: called outside of a scheduled function.

    Example:
        >>> try:
        ...     sg.coordinator.get_current_worker_index()  # here, in no scheduled function
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[0])
        get_current_worker_index was called outside of a scheduled function.

    Source: TF 2.21 coordinator_context.py, get_current_worker_index.
    """
    return _worker_index("get_current_worker_index")


@contextlib.contextmanager
def cache_variable_reads() -> Generator[None]:
    """Caches reads of remote variables in a `with` block. Call in a scheduled function.

    In the block, this worker fetches each variable once; later reads by `variable.value` and by
    steps of `strategy.run` use the copy. Assignments and optimizer updates of this worker are
    visible. Writes of other workers become visible after an update of this worker, or after the
    block. Row lookups are not cached.

    Raises:
        ValueError: such a block is already active.
        RuntimeError: called outside of a scheduled function, or in a replica function.

    Example:
        >>> def evaluate(batches):
        ...     with sg.coordinator.cache_variable_reads():
        ...         return [strategy.run(test_step, args=(batch,)) for batch in batches]
        >>> try:
        ...     evaluate([])  # on a worker: coordinator.schedule(evaluate, args=(batches,))
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[0])
        cache_variable_reads was called outside of a scheduled function.

    Source: TF 2.21 distribute_utils.py, cache_variable_reads, where writes are not seen.
    """
    _worker_index("cache_variable_reads")
    strategy: Any = get_strategy()
    if not in_cross_replica_context():
        raise RuntimeError(
            explain(
                "cache_variable_reads was called in a replica function.",
                expected="a block around strategy.run; one step reads each variable only once.",
                fix="call it in the scheduled function, before strategy.run.",
            )
        )
    with strategy.placement.remote.variables.caching_reads():
        yield


def _worker_index(asked_by: str) -> int:
    if _current.worker_index is None:
        raise RuntimeError(
            explain(
                f"{asked_by} was called outside of a scheduled function.",
                expected="a call in a function that runs on a worker.",
                fix="call it in a function passed to ClusterCoordinator.schedule.",
                code="SG611",
            )
        )
    return _current.worker_index


class Worker(Closing):
    """Listens for a coordinator and runs its functions, from construction until `close`.

    `make_strategy` returns this worker's strategy, given a client of the servers, the index of the
    worker, and the mode in which servers apply gradients.

    Raises:
        OSError: the address is in use.
        ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        packing: Any,
        make_strategy: Callable[[ServerClient, int, UpdateMode], RemoteStateStrategy],
        *,
        host: str = "127.0.0.1",
    ) -> None:
        self._keys = keys
        self._packing = packing
        self._make_strategy = make_strategy
        self._strategy: Any = None
        self._connections: Connections | None = None
        self._coordinator: str | None = None
        self._index = 0
        self._next_order = 0
        self._waiting: dict[int, Request] = {}
        self._answered: dict[int, Message] = {}
        self._num_writes = 0
        self._functions: dict[int, Any] = {}
        self._answers = {
            "join": self._join,
            "function": self._take_function,
            "resource": self._make_resource,
            "move": self._move_server,
        }
        # A function that runs may wait for the server that has moved.
        self._listener = Listener(
            keys,
            self._handle,
            host=host,
            num_threads=1,
            is_inline=lambda message, _: message.kind == "move",
        )

    @property
    def address(self) -> str:
        """Address that the worker listens on."""
        return self._listener.addresses

    def close(self) -> None:
        """Stops listening; abandons a function that still runs."""
        self._listener.close(limit_s=_CLOSE_S)
        if self._connections is not None:
            self._connections.close()

    def _handle(self, request: Request) -> None:
        message = request.message
        if message.kind != "run":
            request.answer(self._answers[message.kind](message))
            return
        # Functions arrive on several connections, but run in the order in which they were sent.
        order = message.fields["order"]
        if order < self._next_order:  # its answer was lost, or it was sent before this join
            request.answer(self._answered.get(order, _AGAIN))
            return
        self._waiting[order] = request
        while (following := self._waiting.pop(self._next_order, None)) is not None:
            answer = self._run(following.message)
            self._answered[self._next_order] = answer
            self._answered.pop(self._next_order - MAX_UNANSWERED, None)
            self._next_order += 1
            following.answer(answer)

    def _join(self, message: Message) -> Message:
        """Joins a coordinator. Fields: its name, this worker's index, the servers, and limits."""
        fields = message.fields
        if fields["coordinator"] != self._coordinator:  # equal after a reconnect
            self._leave()
            silence_s = fields.get("recovery_timeout_s")
            self._connections = Connections(self._keys, fields["servers"], silence_s=silence_s)
            client = ServerClient(self._connections, f"worker {fields['index']}")
            mode = UpdateMode(**fields["mode"])
            self._strategy = self._make_strategy(client, fields["index"], mode)
            self._coordinator, self._index = fields["coordinator"], fields["index"]
        self._next_order = fields["first_order"]
        for request in self._waiting.values():  # their predecessors were lost in transit
            request.answer(_AGAIN)
        self._waiting.clear()
        self._answered.clear()
        return Message("ok", {"pid": os.getpid()})

    def _move_server(self, message: Message) -> Message:
        """Sets a server's new address."""
        if self._connections is not None:
            self._connections.move(message.fields["server"], message.fields["address"])
        return Message("ok")

    def _leave(self) -> None:
        self._functions.clear()
        self._strategy = None
        if self._connections is not None:
            self._connections.close()

    def _take_function(self, message: Message) -> Message:
        (packed,) = message.arrays
        number = message.fields["number"]
        self._functions[number] = self._packing.unpack(packed.tobytes(), self._strategy)
        return Message("ok")

    def _make_resource(self, message: Message) -> Message:
        """Creates an object that functions of this worker share, such as its dataset."""
        (packed,) = message.arrays
        try:
            with self._in_function():
                make = self._packing.unpack(packed.tobytes(), self._strategy)
                self._strategy.placement.remote.variables.resources[message.fields["number"]] = (
                    make()
                )
        except Exception as error:  # noqa: BLE001 - user code
            return failed_message(error, is_input=True)
        return Message("ok")

    def _run(self, message: Message) -> Message:
        """Runs a group of functions, up to the first that fails."""
        client = self._strategy.placement.remote.variables.client
        if message.fields["num_writes"] != self._num_writes:
            self._num_writes = message.fields["num_writes"]
            self._strategy.placement.remote.forget()
        ended: list[Ended] = []
        for call in calls_in(message):
            running = client.in_function(
                f"{self._coordinator} {call.closure}",
                is_rerun=call.is_rerun,
                order=message.fields["order"],
                first_open=message.fields["first_open"],
            )
            ended.append(self._ended(call, running))
            if ended[-1].trace is not None:
                break
        fields = {
            "losses": client.losses,
            "num_repeated": client.num_repeated,
            "built": self._packing.take_built(self._strategy),
        }
        return pack_ended(ended, fields)

    def _ended(self, call: SentCall, running: AbstractContextManager[None]) -> Ended:
        """Runs a function, `running` in a `with` block, and returns its outcome."""
        begin_s = time.monotonic()
        variables = self._strategy.placement.remote.variables
        collected = variables.collected
        _reset(collected.values())
        try:
            function = self._functions[call.function]
            with self._in_function(), running:
                args, kwargs = self._packing.unpack(call.packed, self._strategy)
                result = function(*args, **kwargs)
            # Copy: a later step may donate the buffers.
            plain = map_structure(
                lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) else leaf, result
            )
            packed = self._packing.pack(plain, self._strategy)
        except BaseException as error:  # noqa: BLE001 - an exit, say: the worker continues
            failed = failed_message(error)
            duration_s = time.monotonic() - begin_s
            return Ended(failed.arrays[0].data, duration_s, trace=failed.fields["trace"])
        counted = {
            number: _counted(variable)
            for number, variable in collected.items()
            if variable.storage is not variable.nothing_counted
        }
        return Ended(packed, time.monotonic() - begin_s, counted)

    @contextlib.contextmanager
    def _in_function(self) -> Generator[None]:
        _current.worker_index = self._index
        try:
            with self._strategy.scope():
                yield
        finally:
            _current.worker_index = None


def _reset(variables: Sequence[keras.Variable]) -> None:
    """Resets the metric counts of this worker."""
    for variable in variables:
        if not hasattr(variable, "nothing_counted"):
            shape = np.shape(variable.storage)
            variable.nothing_counted = np.zeros(shape, np.dtype(variable.dtype))
        variable.storage = variable.nothing_counted


def _counted(variable: keras.Variable) -> np.ndarray:
    """Returns a function's metric count, summed over the replicas of this worker."""
    stored = np.asarray(variable.storage)
    return stored.sum(0, dtype=stored.dtype) if stored.ndim > len(variable.shape) else stored
