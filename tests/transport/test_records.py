"""Records of messages in a file: what was written is read, and damage ends it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from stratagem.transport.records import (
    HEADER_BYTES,
    MARK,
    find_record,
    read_record,
    write_record,
)
from stratagem.transport.wire import Message


def _message(number: int) -> Message:
    return Message("x", {"number": number}, [np.arange(number * 5000), np.array(number, np.int8)])


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    path = tmp_path / "records"
    with path.open("wb", buffering=0) as file:
        for number in range(3):
            write_record(file, _message(number))
    return path.read_bytes()


def _found(data: bytes) -> list[Message]:
    """Messages of all records up to the first damaged one."""
    view, found, place = memoryview(data), [], 0
    while (body := find_record(lambda begin, end: view[begin:end], len(data), place)) is not None:
        assert body[0] == place + HEADER_BYTES
        assert bytes(view[place : place + len(MARK)]) == MARK
        found.append(read_record(view[body[0] : body[1]]))
        place = body[1]
    return found


def test_messages_are_read_as_they_were_written(data) -> None:
    found = _found(data)
    assert len(found) == 3
    for number, message in enumerate(found):
        expected = _message(number)
        assert (message.kind, message.fields) == (expected.kind, expected.fields)
        for one, other in zip(message.arrays, expected.arrays, strict=True):
            assert one.dtype == other.dtype
            np.testing.assert_array_equal(one, other)


def test_any_changed_byte_ends_the_records(data) -> None:
    for place in np.random.default_rng(0).integers(0, len(data), 300).tolist():
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        found = _found(bytes(damaged))
        assert len(found) < 3
        assert [one.fields["number"] for one in found] == [*range(len(found))]


def test_missing_bytes_end_the_records(data) -> None:
    for size in (0, 1, HEADER_BYTES - 1, HEADER_BYTES, len(data) // 2, len(data) - 1):
        assert len(_found(data[:size])) < 3


def test_bodies_that_are_none_are_refused() -> None:
    for body in (b"", b"\xff" * 4, b"\1\0\0\0" + b"\xff" * 8, b"\0" * 4):
        with pytest.raises(ConnectionError, match="invalid"):
            read_record(memoryview(body))
