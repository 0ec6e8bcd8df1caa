"""Messages to parameter servers: what goes in comes out, and what is no message is refused."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stratagem.group.transport.wire import PING, WHERE, Message, in_parts, is_message, pack, unpack

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


@pytest.mark.parametrize("kind", ["", "ping", "here"])
def test_messages_are_distinguished_from_requests_of_connections(kind) -> None:
    assert is_message(pack(Message(kind)))
    assert not is_message([PING, b"1"])
    assert not is_message([WHERE])


def test_types_of_jax_come_back() -> None:
    array = np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3)
    (got,) = unpack(pack(Message("push", {}, [array]))).arrays
    assert got.dtype == array.dtype
    np.testing.assert_array_equal(got, array)


def test_large_arrays_are_not_copied() -> None:
    array = np.zeros(10_000, np.float32)
    (got,) = unpack(pack(Message("push", {}, [array]))).arrays
    array[1] = 5
    assert got[1] == 5


@pytest.mark.parametrize("size", [4, 10_000])
def test_what_is_received_is_not_to_be_written(size) -> None:
    frames = pack(Message("push", {}, [np.zeros(size, np.float32)]))
    for received in (unpack(frames), unpack([bytes(frame) for frame in frames])):
        with pytest.raises(ValueError, match="read-only"):
            received.arrays[0][0] = 1


def test_small_arrays_travel_with_the_header() -> None:
    small = [np.full(shape, 3, dtype) for dtype in DTYPES for shape in [(), (1,), (5, 3), (0, 7)]]
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


def test_arrays_that_do_not_lie_in_one_piece_come_back() -> None:
    array = np.arange(12).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(unpack(pack(Message("x", {}, [array]))).arrays[0], array)


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
    "frames",
    [
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
    ],
)
def test_what_is_no_message_is_refused(frames) -> None:
    with pytest.raises(ConnectionError, match="received an invalid message"):
        unpack(frames)


@pytest.mark.parametrize(
    ("array", "content"),
    [
        (["float32", [2]], b"1234567"),
        (["int8", [-1, -1]], b"1"),
    ],
)
def test_arrays_of_another_size_are_refused(array, content) -> None:
    with pytest.raises(ConnectionError, match=f"{len(content)} bytes for an array {array[0]}"):
        unpack([_with_array(array, content)])


@pytest.mark.parametrize("frames", [[], [bytes(39_999)], [bytes(40_001)]])
def test_large_arrays_of_another_size_are_refused(frames) -> None:
    came = sum(map(len, frames))
    with pytest.raises(ConnectionError, match=f"{came} bytes for an array float32"):
        unpack([_header(arrays=[["float32", [10_000]]]), *frames])
