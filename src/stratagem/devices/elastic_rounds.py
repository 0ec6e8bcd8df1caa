"""Operations of an elastic group's rounds as part of a compiled program.

A program starts them one after the other, since each has the outcome of the one before among its
arguments. If a member is lost, the operations that remain return zeros at once, and the commit
returns 0. So the program ends, and can keep its old values.
"""

from __future__ import annotations

import enum
import queue
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stratagem.devices.shared_sums import (
    DTYPES,
    PendingCall,
    flush_denormals,
    handlers_work,
    register_handler,
)
from stratagem.errors import explain
from stratagem.group.elastic.group import ElasticGroup
from stratagem.group.elastic.peer_connections import PeerConnections

_TARGET = "stratagem_elastic_round"


class RoundOperation(enum.IntEnum):
    """An operation of a round."""

    SUM = 0
    MAX = 1
    MIN = 2
    GATHER = 3
    ALL_TO_ALL = 4
    COMMIT = 5


_UFUNCS = {
    RoundOperation.SUM: np.add,
    RoundOperation.MAX: np.maximum,
    RoundOperation.MIN: np.minimum,
}


class Rounds:
    """The operations of one round in a program that is traced, in their order."""

    def __init__(self) -> None:
        self._order: Any = jnp.uint32(0)

    def combine(self, operation: RoundOperation, array: jax.Array) -> jax.Array:
        """Returns the sum, maximum or minimum over members."""
        return self._call(operation, array, array.shape)

    def gather(self, array: jax.Array, num_members: int) -> jax.Array:
        """Returns the arrays of all members, of shape (num_members, ...)."""
        return self._call(RoundOperation.GATHER, array, (num_members, *array.shape))

    def all_to_all(self, array: jax.Array) -> jax.Array:
        """Returns row r of member i as row i of member r; rows are on axis 0."""
        return self._call(RoundOperation.ALL_TO_ALL, array, array.shape)

    def commit(self) -> jax.Array:
        """Ends the round; returns True if it is committed."""
        return self._call(RoundOperation.COMMIT, jnp.uint32(0), ()) > 0

    def _call(
        self, operation: RoundOperation, array: jax.Array, shape: tuple[int, ...]
    ) -> jax.Array:
        dtype = array.dtype
        sent = array if dtype.name in DTYPES else array.astype(_carrier(dtype))
        call = jax.ffi.ffi_call(
            _TARGET,
            (jax.ShapeDtypeStruct(shape, sent.dtype), jax.ShapeDtypeStruct((), np.uint32)),
            input_output_aliases={1: 1},
        )
        result, self._order = call(sent, self._order, jnp.uint32(operation))
        return result.astype(dtype)


def _carrier(dtype: np.dtype[Any]) -> Any:
    """Returns the dtype in which values of another are sent."""
    return np.uint8 if dtype.kind == "b" else np.float32


class _Server:
    """Runs operations in threads of its own, one after the other."""

    def __init__(self) -> None:
        self.group: ElasticGroup | None = None
        self.error: Exception | None = None
        self._calls: queue.SimpleQueue[PendingCall] = queue.SimpleQueue()
        register_handler(_TARGET, self._calls.put)
        # A program may continue in the thread that completes a call, while another serves the next.
        for place in range(2):
            name = f"stratagem elastic rounds {place}"
            threading.Thread(target=self._serve, name=name, daemon=True).start()

    def _serve(self) -> None:
        flush_denormals()
        while True:
            call = self._calls.get()
            try:
                self._run(call)
            except Exception as error:  # noqa: BLE001 - raised where the program is awaited
                self.error = error
                call.fail(str(error))
            else:
                call.complete()
            del call

    def _run(self, call: PendingCall) -> None:
        group = self.group
        assert group is not None
        operation, own = RoundOperation(int(call.arguments[2][0])), call.arguments[0]
        result = call.results[0]
        if operation is RoundOperation.COMMIT:
            result[0] = group.commit()
        elif not group.operate(_body(operation, own, result)):
            result[...] = 0


def _body(
    operation: RoundOperation, own: np.ndarray[Any, Any], result: np.ndarray[Any, Any]
) -> Callable[[PeerConnections], None]:
    if operation is RoundOperation.GATHER:
        return lambda peers: peers.gather_into(own, result)
    if operation is RoundOperation.ALL_TO_ALL:
        return lambda peers: peers.all_to_all(own, result)
    return lambda peers: peers.reduce(own, result, _UFUNCS[operation])


_servers: list[_Server] = []


def serve_rounds(group: ElasticGroup) -> None:
    """Starts to serve the operations of programs; raises RuntimeError if XLA does not allow it."""
    if not handlers_work():
        raise RuntimeError(
            explain(
                "This version of jaxlib does not call handlers as expected.",
                expected="XLA's interface for custom calls of version 0.3, on CPU.",
                fix="use a version of JAX that this version of Stratagem was tested with, or "
                "MultiWorkerMirroredStrategy.",
            )
        )
    if not _servers:
        _servers.append(_Server())
    _servers[0].group = group


def error_of_rounds() -> Exception | None:
    """Returns the error that ended a program, once."""
    error, _servers[0].error = _servers[0].error, None
    return error
