"""A worker: a process that runs what the coordinator sends it, one function after the other."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np

from stratagem.closing import Closing
from stratagem.context import get_strategy, in_cross_replica_context
from stratagem.messages import explain
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.cluster.remote_state_strategy import RemoteStateStrategy
from stratagem.parameter_server.coordinator.packing import Packing
from stratagem.parameter_server.coordinator.structures import map_structure
from stratagem.parameter_server.coordinator.worker_errors import failed_message
from stratagem.parameter_server.server.updates import UpdateMode
from stratagem.parameter_server.transport.connection import Connections
from stratagem.parameter_server.transport.keys import ClusterKeys
from stratagem.parameter_server.transport.listener import Listener, Request
from stratagem.parameter_server.transport.wire import Message

__all__ = ["Worker", "cache_variable_reads", "get_current_worker_index"]

_AGAIN = Message("again")  # it did not run, and is to be sent anew
# A coordinator that closes has given up what runs; this is for what is about to end.
_CLOSE_S = 0.2
_MAX_ANSWERED = 4  # as many as may be asked for at a time, and some more


class _Current(threading.local):
    worker_index: int | None = None


_current: _Current = _Current()


def get_current_worker_index() -> int:
    """Returns the index of the worker that runs the function. Call in a scheduled function.

    Returns:
        Its index among the workers, from 0.

    Raises:
        RuntimeError: elsewhere.

    Source: TF 2.21 coordinator_context.py, get_current_worker_index.
    """
    return _worker_index("get_current_worker_index")


@contextlib.contextmanager
def cache_variable_reads() -> Generator[None]:
    """Lets a block of a scheduled function read each variable once. Call in a scheduled function.

    In the block reads of variables on servers, by `variable.value` and by the steps of
    `strategy.run`, are answered from this worker's copy, which the first of them has fetched. What
    this function writes is seen, by its assignments and by its optimizers; what other workers write
    is seen after an update of this one, or after the block. Tables, of which rows are looked up,
    are asked for each time.

    Raises:
        ValueError: in such a block. RuntimeError: outside every scheduled function, or in a replica
            function.

    Example::

        def evaluate(batches):
            with sg.coordinator.cache_variable_reads():
                return [strategy.run(test_step, args=(batch,)) for batch in batches]

    Source: TF 2.21 distribute_utils.py, cache_variable_reads, where writes are not seen.
    """
    _worker_index("cache_variable_reads")
    strategy: Any = get_strategy()
    if not in_cross_replica_context():
        raise RuntimeError(
            explain(
                "cache_variable_reads was called in a replica function.",
                expected="a block around strategy.run: a step reads each variable once anyway.",
                fix="call it in the scheduled function, before strategy.run.",
            )
        )
    with strategy.placement.remote.variables.caching_reads():
        yield


def _worker_index(asked_by: str) -> int:
    if _current.worker_index is None:
        raise RuntimeError(
            explain(
                f"{asked_by} was called outside every scheduled function.",
                expected="a function that a worker runs.",
                fix="call it in the function that is given to ClusterCoordinator.schedule.",
            )
        )
    return _current.worker_index


class Worker(Closing):
    """Runs functions for a coordinator, from the moment it is made.

    Args:
        keys: keys of the cluster.
        packing: pickles functions and values.
        make_strategy: returns this worker's strategy, for a client of the servers, the index of the
            worker, and the mode in which servers apply gradients.
        host: address to listen at.
        port: port to listen at; 0 for any free one.

    Raises:
        OSError: the address is taken. ImportError: pyzmq is not installed.
    """

    def __init__(
        self,
        keys: ClusterKeys,
        packing: Packing,
        make_strategy: Callable[[ServerClient, int, UpdateMode], RemoteStateStrategy],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
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
        self._listener = Listener(
            keys, self._handle, host=host, port=port, num_threads=1, at_once={"move"}
        )

    @property
    def address(self) -> str:
        """Address of this worker."""
        return self._listener.address

    def close(self) -> None:
        """Stops to listen; a function that runs on is given up."""
        self._listener.close(limit_s=_CLOSE_S)
        if self._connections is not None:
            self._connections.close()

    def _handle(self, request: Request) -> None:
        message = request.message
        if message.kind != "run":
            request.answer(self._answers[message.kind](message))
            return
        # They come by several connections, and run in the order in which they were sent.
        order = message.fields["order"]
        if order < self._next_order:  # the answer was lost; or it was sent before this one joined
            request.answer(self._answered.get(order, _AGAIN))
            return
        self._waiting[order] = request
        while (following := self._waiting.pop(self._next_order, None)) is not None:
            try:
                answer = self._run(following.message)
            except BaseException as error:  # noqa: BLE001 - such as an exit; the next one runs
                answer = failed_message(error)
            self._answered[self._next_order] = answer
            self._answered.pop(self._next_order - _MAX_ANSWERED, None)
            self._next_order += 1
            following.answer(answer)

    def _join(self, message: Message) -> Message:
        """Fields: the coordinator's name, this worker's index, the servers, and limits."""
        told = message.fields
        if told["coordinator"] != self._coordinator:  # else it has come back to the same one
            self._leave()
            silence_s = told.get("recovery_timeout_s")
            self._connections = Connections(self._keys, told["servers"], silence_s=silence_s)
            client = ServerClient(self._connections, f"worker {told['index']}")
            mode = UpdateMode(**told["mode"])
            self._strategy = self._make_strategy(client, told["index"], mode)
            self._coordinator, self._index = told["coordinator"], told["index"]
        self._next_order = told["first_order"]
        for request in self._waiting.values():  # what they wait for was lost on its way
            request.answer(_AGAIN)
        self._waiting.clear()
        self._answered.clear()
        return Message("ok", {"pid": os.getpid()})

    def _move_server(self, message: Message) -> Message:
        """A server is elsewhere now; a function that runs may wait for it."""
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
        """Makes what functions of this worker use again and again, such as its dataset."""
        (packed,) = message.arrays
        try:
            with self._in_function():
                make = self._packing.unpack(packed.tobytes(), self._strategy)
                self._strategy.placement.remote.variables.resources[message.fields["number"]] = (
                    make()
                )
        except Exception as error:  # noqa: BLE001 - of the user
            return failed_message(error, is_input=True)
        return Message("ok")

    def _run(self, message: Message) -> Message:
        """Fields: the number of a function; the array is its packed arguments."""
        (packed,) = message.arrays
        function = self._functions[message.fields["number"]]
        if message.fields["num_writes"] != self._num_writes:
            self._num_writes = message.fields["num_writes"]
            self._strategy.placement.remote.forget()
        collected = self._strategy.placement.remote.variables.collected
        _reset(collected.values())
        try:
            with self._in_function():
                args, kwargs = self._packing.unpack(packed.tobytes(), self._strategy)
                result = function(*args, **kwargs)
            # Copied: what a later step donates must not be looked at.
            plain = map_structure(
                lambda leaf: np.array(leaf) if isinstance(leaf, jax.Array) else leaf, result
            )
            answer = self._packing.pack(plain, self._strategy)
        except Exception as error:  # noqa: BLE001 - of the user
            return failed_message(error)
        counted = {
            number: _counted(variable)
            for number, variable in collected.items()
            if variable.storage is not variable.nothing_counted
        }
        fields = {
            "counted": list(counted),
            "num_lost": self._strategy.placement.remote.variables.client.lost_updates,
            "built": self._packing.take_built(self._strategy),
        }
        return Message("done", fields, [np.frombuffer(answer, np.uint8), *counted.values()])

    @contextlib.contextmanager
    def _in_function(self) -> Generator[None]:
        _current.worker_index = self._index
        try:
            with self._strategy.scope():
                yield
        finally:
            _current.worker_index = None


def _reset(variables: Any) -> None:
    """Lets what is counted on each worker begin anew."""
    for variable in variables:
        if not hasattr(variable, "nothing_counted"):
            shape = np.shape(variable.storage)
            variable.nothing_counted = np.zeros(shape, np.dtype(variable.dtype))
        variable.storage = variable.nothing_counted


def _counted(variable: Any) -> np.ndarray:
    """Returns a function's count, summed over the replicas of this worker."""
    stored = np.asarray(variable.storage)
    return stored.sum(0, dtype=stored.dtype) if stored.ndim > len(variable.shape) else stored
