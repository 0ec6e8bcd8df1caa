"""Fuzz tests of all that reads a server's sockets: the named error, and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from stratagem.group.transport.keys import ClusterKeys
from stratagem.group.transport.listener import ClientMemories
from stratagem.group.transport.shared_memory import ClientMemory, is_placed
from stratagem.group.transport.wire import PING, Message, is_message, numeric_dtype, pack, unpack
from stratagem.parameter_server.server.server import ParameterServer
from tests.fuzzing import JSON, fuzz
from tests.unit.parameter_server.fuzzing import damaged

_ARRAYS = [np.arange(5, dtype=np.int16), np.ones((2, 3), np.float32), np.zeros(9000, np.int8)]
_FIELDS = {
    "client": "c",
    "number": 1,
    "names": ["v"],
    "sign": 1,
    "whole": ["v"],
    "rows": [],
    "version": 0,
    "pull": ["v"],
    "mode": {"num_needed": 0},
    "optimizer": "",
    "specs": [{"name": "v", "shape": [5], "dtype": "int16"}],
    "is_pickled": False,
    "num_needed": 1,
    "name": "count",
}
_FRAMES = [bytes(frame) for frame in pack(Message("push", _FIELDS, _ARRAYS))]
_KINDS = (
    "pull",
    "pull_rows",
    "scalars",
    "describe",
    "create",
    "assign",
    "scatter",
    "drop_rule",
    "set_scalar",
    "expect",
    "flush",
    "push",
    "?",
)
_DTYPES = st.sampled_from(
    ["float32", "bfloat16", "O", "object", "V0", "S0", "U4", "i4,(", "(2,)i4", "datetime64[s]", "x"]
)
# Not "rule": an authenticated client's optimizer is unpickled, which is trusted.
_FORGED = st.builds(
    lambda kind, fields, arrays, rest: (
        json.dumps({"kind": kind, "fields": fields, "arrays": arrays}).encode() + b"\0" + rest
    ),
    st.sampled_from(_KINDS) | st.text(max_size=5),
    st.fixed_dictionaries({}, optional=dict.fromkeys(_FIELDS, JSON)).map(
        lambda changed: {**_FIELDS, **changed}
    )
    | JSON,
    st.lists(st.tuples(_DTYPES, st.lists(st.integers(-2, 2**40), max_size=3)), max_size=3) | JSON,
    st.binary(max_size=60),
)
_MESSAGES = st.one_of(
    st.lists(st.binary(max_size=30), max_size=4),
    st.tuples(damaged(_FRAMES[0]), st.sampled_from([_FRAMES[1:], []])).map(
        lambda parts: [parts[0], *parts[1]]
    ),
    _FORGED.map(lambda first: [first]),
    st.tuples(_FORGED, st.binary(max_size=60)).map(list),
)


@fuzz
@given(_MESSAGES)
def test_message_is_read_or_refused(frames) -> None:
    if not is_message(frames):
        return
    try:
        message = unpack(frames)
    except ConnectionError as error:
        assert "invalid message" in str(error) or "bytes for an array" in str(error)  # noqa: PT017
        return
    again = unpack(pack(message))
    assert again.kind == message.kind
    for one, other in zip(again.arrays, message.arrays, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


@pytest.mark.parametrize(
    "dtype", ["O", "i4,(", "i4,i4", "U4", "V8", "datetime64[s]", "", "int32\n"]
)
def test_only_names_of_numeric_types_are_read(dtype) -> None:
    header = {"kind": "x", "fields": {}, "arrays": [[dtype, []]]}
    with pytest.raises(ConnectionError, match="invalid message"):
        unpack([json.dumps(header).encode() + bytes(40)])
    with pytest.raises(ValueError, match=" is no numeric dtype"):
        numeric_dtype(dtype)


@pytest.fixture(scope="module")
def memories() -> Iterator[tuple[ClientMemories, ClientMemory]]:
    memories, memory = ClientMemories(), ClientMemory(2**16, 2**16)
    assert any(memories.share(b"c", memory.offer)[1:])
    yield memories, memory
    memory.close()


@fuzz
@given(data=st.data())
def test_message_in_shared_memory_is_read_or_refused(memories, data) -> None:
    shared, memory = memories
    if not shared.can_read(b"c", [b"placed\0\0"]):
        assert any(shared.share(b"c", memory.offer)[1:])
    large = [b"{}", bytes(70_000)]
    first, *rest = [bytes(frame) for frame in memory.placed(large)]
    frames = [data.draw(damaged(first)), *rest]
    try:
        for frame in shared.read(b"c", frames) if is_placed(frames) else ():
            bytes(frame)
    except ConnectionError:
        pass


@fuzz
@given(data=st.data())
def test_offer_of_memory_is_taken_or_declined(memories, data) -> None:
    shared, memory = memories
    offer = data.draw(
        damaged(memory.offer)
        | st.builds(
            lambda changed: json.dumps({**json.loads(memory.offer), **changed}).encode(),
            st.dictionaries(
                st.sampled_from(["pid", "file", "word", "requests_bytes", "answers_bytes"]), JSON
            ),
        )
        | JSON.map(lambda value: json.dumps(value).encode())
        | st.just(b"[" * 100_000)
    )
    answer = shared.share(b"other", offer)
    assert len(answer) == 2
    shared.forget(b"other")


class _Raw:
    """A member of a server's cluster that sends any frames."""

    def __init__(self, server: ParameterServer, keys: ClusterKeys) -> None:
        self.server = server
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        keys.unlock(self._socket)
        self._socket.connect(server.address)
        self._number = 0

    def send(self, frames: list[bytes]) -> None:
        self._socket.send_multipart(frames)

    def settle(self) -> None:
        """Waits until the server has answered all."""
        self._number += 1
        number = b"settled%d" % self._number
        self.send([number, *map(bytes, pack(Message("describe")))])
        while True:
            assert self._socket.poll(60_000), "the server does not answer"
            if self._socket.recv_multipart()[0] == number:
                break

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture(scope="module")
def raw() -> Iterator[_Raw]:
    keys = ClusterKeys.make()
    with ParameterServer(keys, num_threads=1) as server:
        raw = _Raw(server, keys)
        yield raw
        raw.close()


@fuzz
@given(number=st.binary(max_size=9), frames=_MESSAGES)
def test_server_answers_after_any_request_of_a_member(raw, number, frames) -> None:
    raw.send([b"n" + number, *frames])
    raw.send([b"m" + number, PING, *frames])
    raw.settle()


@pytest.mark.slow
def test_server_holds_nothing_of_requests_that_it_refused(raw) -> None:
    rng = np.random.default_rng(0)
    clients = {*raw.server._changes._clients}

    def send(count: int) -> None:
        for _ in range(count):
            frames = [rng.bytes(200), rng.bytes(2000)]
            raw.send([rng.bytes(8), *frames])
            fields = {**_FIELDS, "client": rng.bytes(8).hex(), "names": [3]}
            raw.send([rng.bytes(8), *map(bytes, pack(Message("assign", fields, _ARRAYS)))])
        raw.settle()

    send(200)
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        send(1000)
        grown_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
    finally:
        tracemalloc.stop()
    assert grown_bytes < 1_000_000  # of 12 MB that were sent
    assert {*raw.server._changes._clients} == clients
