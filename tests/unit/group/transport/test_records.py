"""Records with checksums."""

from __future__ import annotations

import io

import pytest

from stratagem.group.transport.journal import frames_in, last_frame_offset, record_at, write_record

FRAMES = [b"first", b"", b"third" * 50]


def written() -> bytes:
    file = io.BytesIO(b"head")
    file.seek(4)
    write_record(file, FRAMES)
    return file.getvalue()


def test_frames_come_back_from_the_middle_of_a_file() -> None:
    data = memoryview(written() + b"more")
    found = record_at(lambda begin, end: data[begin:end], 4, len(data))
    assert found is not None
    begin, end = found
    assert [*map(bytes, frames_in(data[begin:end]))] == FRAMES
    assert bytes(data[end:]) == b"more"
    offset = 4 + last_frame_offset([len(frame) for frame in FRAMES[:-1]])
    assert bytes(data[offset:end]) == FRAMES[-1]


def test_each_changed_byte_is_found() -> None:
    data = written()
    for place in range(4, len(data)):
        changed = bytearray(data)
        changed[place] ^= 1
        assert record_at(lambda a, b, one=changed: memoryview(one)[a:b], 4, len(data)) is None
    for length in range(4, len(data)):
        cut = memoryview(data)[:length]
        assert record_at(lambda a, b, one=cut: one[a:b], 4, length) is None


def test_body_that_is_no_record() -> None:
    with pytest.raises(ConnectionError, match="invalid frames"):
        frames_in(memoryview(b"\xff" * 4))
