"""Fuzz tests of all that reads a server's sockets: the named error, and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.listener import ClientMemories
from stratagem.group.transport.shared_memory import ClientMemory, is_placed
from stratagem.group.transport.wire import (
    PING,
    SHARE,
    Message,
    in_parts,
    is_message,
    numeric_dtype,
    pack,
    unpack,
)
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
        self._socket.connect(server.address.partition(" ")[0])
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


# Messages to parameter servers: what goes in comes out, and what is no message is refused.

DTYPES = ("float32", "float64", "int8", "int64", "uint16", "bool", "float16", "complex64")


@given(
    st.text(max_size=20),
    st.dictionaries(st.text(max_size=9), st.none() | st.booleans() | st.integers() | st.text()),
    st.lists(
        hnp.arrays(st.sampled_from(DTYPES), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0)),
        max_size=4,
    ),
)
def test_message_comes_back(kind, fields, arrays) -> None:
    message = unpack([bytes(frame) for frame in pack(Message(kind, fields, arrays))])
    assert (message.kind, message.fields) == (kind, fields)
    for got, wanted in zip(message.arrays, arrays, strict=True):
        assert got.dtype == wanted.dtype
        assert got.shape == wanted.shape
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("size", [4, 10_000])
def test_what_is_received_is_not_to_be_written_and_large_arrays_are_not_copied(size) -> None:
    array = np.zeros(size, np.float32)
    frames = pack(Message("push", {}, [array]))
    assert is_message(frames)
    assert not is_message([PING, b"1"])
    assert not is_message([SHARE])
    received = [unpack(frames), unpack([bytes(frame) for frame in frames])]
    for message in received:
        with pytest.raises(ValueError, match="read-only"):
            message.arrays[0][0] = 1
    array[1] = 5
    assert received[0].arrays[0][1] == (5 if size > 4 else 0)


def test_small_arrays_travel_with_the_header() -> None:
    dtypes = (*DTYPES, ml_dtypes.bfloat16)
    small = [np.full(shape, 3, dtype) for dtype in dtypes for shape in [(), (1,), (5, 3), (0, 7)]]
    small.append(np.arange(12).reshape(3, 4)[:, ::2])  # not in one piece
    frames = pack(Message("push", {"names": ["a"]}, [*small, np.zeros(10_000), *small]))
    assert [len(frame) for frame in frames[1:]] == [80_000]
    got = unpack([bytes(frame) for frame in frames]).arrays
    for one, wanted in zip(got, [*small, np.zeros(10_000), *small], strict=True):
        assert one.flags.aligned
        np.testing.assert_array_equal(one, wanted, strict=True)


def test_many_small_arrays_do_not_make_one_large_frame() -> None:
    arrays = [np.full(1000, number) for number in range(300)]
    frames = pack(Message("push", {}, arrays))
    assert max(len(frame) for frame in frames) < 2**18
    assert 1 < len(frames) < 300
    for got, wanted in zip(unpack(frames).arrays, arrays, strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_large_arrays_travel_in_parts(extra) -> None:
    array = np.random.default_rng(0).integers(0, 256, 2 * 2**20 + extra, np.uint8)
    message = Message("x", {}, [array, np.zeros(0), array[:8].view(np.float64), array[::2]])
    frames = in_parts(pack(message))
    assert max(len(frame) for frame in frames) <= 2**20
    got = unpack([bytes(frame) for frame in frames])
    np.testing.assert_array_equal(got.arrays[0], array)
    np.testing.assert_array_equal(got.arrays[2].view(np.uint8), array[:8])
    np.testing.assert_array_equal(got.arrays[3], array[::2])
    assert not got.arrays[0].flags.writeable
    with pytest.raises(ConnectionError, match="bytes for an array uint8"):
        unpack([bytes(frame) for frame in [*frames[:2], frames[2][:-1], *frames[3:]]])


def _header(**changes) -> bytes:
    return json.dumps({"kind": "x", "fields": {}, "arrays": [], **changes}).encode() + b"\0"


def _with_array(array, content: bytes) -> bytes:
    header = _header(arrays=[array])
    return header + bytes(-len(header) % 16) + content


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        *(
            (frames, "received an invalid message")
            for frames in (
                [],
                [b""],
                [b"\xff\xfe"],
                [b"[1]"],
                [b"{}"],
                [b"[" * 100_000],
                [_header(fields=3)],
                [_header(), b"more"],
                [_header() + b"more"],
                [_with_array(["float32", [2]], b"123456789")],
                [_with_array(["no such", [1]], b"12345678")],
                [_with_array(["float32", "2"], b"12345678")],
            )
        ),
        ([_with_array(["float32", [2]], b"1234567")], "7 bytes for an array float32"),
        ([_with_array(["int8", [-1, -1]], b"1")], "1 bytes for an array int8"),
        ([_header(arrays=[["float32", [10_000]]])], "0 bytes for an array"),
        *(
            ([_header(arrays=[["float32", [10_000]]]), bytes(came)], f"{came} bytes for an array")
            for came in (39_999, 40_001)
        ),
    ],
)
def test_what_is_no_message_is_refused(frames, words) -> None:
    with pytest.raises(ConnectionError, match=words):
        unpack(frames)
