"""Journals: what was appended is there, whenever the writer died."""

from __future__ import annotations

import contextlib
import os
import resource
import stat
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.group.transport.journal import _RECORD, MARK, Journal, frames_in
from stratagem.group.transport.wire import Message


def message(number: int) -> Message:
    rng = np.random.default_rng(number)
    arrays = [rng.normal(size=(number, 2)), np.arange(number, dtype=np.int8), np.array(number)]
    return Message("update", {"number": number}, arrays)


def numbers(journal: Journal) -> list[int]:
    """Those of its messages, whose arrays are right."""
    found = [int(one.fields["number"]) for one in journal.messages]
    for number, one in zip(found, journal.messages, strict=True):
        for got, wanted in zip(one.arrays, message(number).arrays, strict=True):
            np.testing.assert_array_equal(got, wanted)
    return found


def write(path: Path, count: int) -> list[int]:
    """A journal of so many messages; returns its size after each."""
    with Journal(path) as journal:
        sizes = [journal.size_bytes]
        for number in range(count):
            journal.append(message(number))
            sizes.append(journal.size_bytes)
    return sizes


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def dropping(count: int, place: int) -> Any:
    records = "1 record" if count == 1 else f"{count} records"
    return pytest.warns(RuntimeWarning, match=rf"{records} of \d+ bytes from byte {place} on were")


def test_messages_are_there_again_and_more_can_follow(tmp_path) -> None:
    path = tmp_path / "new folder" / "journal"
    write(path, 3)
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1, 2]
        journal.append(message(3))
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1, 2, 3]


def test_journal_is_never_read_as_a_whole(tmp_path) -> None:
    path = tmp_path / "journal"
    count, values = 64, np.arange(2**16)
    with Journal(path) as journal:
        for number in range(count):
            journal.append(Message("large", arrays=[values + number]))
    tracemalloc.start()
    try:
        with Journal(path) as journal:
            for number, one in enumerate(journal.messages):
                np.testing.assert_array_equal(one.arrays[0], values + number)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < count * values.nbytes / 8


@pytest.mark.slow
def test_unfinished_record_is_cut_off_wherever_the_writer_died(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        wanted = list(range(sum(size >= one for one in sizes[1:])))
        is_cut = size > sizes[0] and size not in sizes
        with dropping(1, sizes[len(wanted)]) if is_cut else contextlib.nullcontext():
            journal = Journal(path)
        with journal:
            assert journal.num_dropped == is_cut
            assert numbers(journal) == wanted
            journal.append(message(9))
        with Journal(path) as journal:
            assert numbers(journal) == [*wanted, 9]


def test_last_record_of_which_pages_are_missing_is_cut_off(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    data = bytearray(path.read_bytes())
    data[sizes[2] + 20 :] = bytes(len(data) - sizes[2] - 20)
    path.write_bytes(data)
    with dropping(1, sizes[2]):
        journal = Journal(path)
    with journal:
        assert numbers(journal) == [0, 1]


def test_record_that_was_changed_is_reported(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    data = bytearray(path.read_bytes())
    data[sizes[1] + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataLossError, match=f"the record at byte {sizes[1]} fails its checksum"):
        Journal(path)
    assert path.read_bytes() == bytes(data)  # left as it is


@pytest.mark.parametrize("place", range(20))
def test_changed_header_is_no_reason_to_drop_the_records_after_it(tmp_path, place) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    data = bytearray(path.read_bytes())
    data[sizes[1] + place] ^= 0x40
    path.write_bytes(data)
    with pytest.raises(
        DataLossError, match=f"byte {sizes[1]} fails its checksum, after 1 intact ones"
    ):
        Journal(path)
    assert path.read_bytes() == bytes(data)


def test_several_damaged_records_at_the_end_are_dropped_and_counted(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 4)
    data = bytearray(path.read_bytes())
    for at in (sizes[2] + 30, sizes[3] + 30):
        data[at] ^= 1
    path.write_bytes(data)
    with dropping(2, sizes[2]):
        journal = Journal(path)
    with journal:
        assert (numbers(journal), journal.num_dropped) == ([0, 1], 2)


def test_only_the_user_can_read_a_journal_and_its_folder(tmp_path) -> None:
    path = tmp_path / "folder" / "journal"
    before = os.umask(0)
    try:
        with Journal(path) as journal:
            journal.append(message(1))
            assert mode(path) == 0o600
            journal.replace([message(2)])
            assert mode(path) == 0o600
    finally:
        os.umask(before)
    assert mode(path.parent) == 0o700
    path.chmod(0o644)
    with Journal(path):
        assert mode(path) == 0o600


@pytest.mark.parametrize("version", [b"1", b"4"])
def test_journal_of_another_version_is_refused_and_left_alone(tmp_path, version) -> None:
    path = tmp_path / "journal"
    data = b"stratagem journal " + version + b"\n" + bytes(100)
    path.write_bytes(data)
    with pytest.raises(DataLossError, match=f"has version {version.decode()} of the format"):
        Journal(path)
    assert path.read_bytes() == data


def test_journal_of_the_version_before_is_read_and_continued(tmp_path) -> None:
    path = tmp_path / "journal"
    write(path, 3)
    data = path.read_bytes()
    assert data.startswith(b"stratagem journal 3\n")
    path.write_bytes(data.replace(b"journal 3", b"journal 2", 1))
    with Journal(path) as journal:
        assert len(journal.messages) == 3
        journal.append(journal.messages[0])
        journal.messages.clear()
    assert path.read_bytes().startswith(data)
    with Journal(path) as journal:
        assert len(journal.messages) == 4


def test_record_that_no_server_wrote_is_reported(tmp_path) -> None:
    """Its checksums are right, as those of a forger."""
    path = tmp_path / "journal"
    write(path, 1)
    for body in (b"", b"\xff" * 4, b"\1\0\0\0" + (3).to_bytes(8, "little") + b"{]}"):
        header = _RECORD.pack(MARK, len(body), zlib.crc32(body))
        record = header + zlib.crc32(header).to_bytes(4, "little") + body
        path.write_bytes(path.read_bytes() + record)
        with Journal(path) as journal, pytest.raises(DataLossError, match="invalid contents"):
            _ = journal.messages[-1]
    with pytest.raises(ConnectionError, match="invalid frames"):
        frames_in(memoryview(b"\xff" * 4))


def test_other_file_is_refused_and_left_alone(tmp_path) -> None:
    path = tmp_path / "journal"
    path.write_text("my thesis")
    with pytest.raises(DataLossError, match="it is not a journal of a parameter server"):
        Journal(path)
    assert path.read_text() == "my thesis"


def test_journal_is_replaced_as_a_whole(tmp_path) -> None:
    path = tmp_path / "journal"
    write(path, 3)
    with Journal(path) as journal:
        journal.replace([message(5)])
        journal.append(message(6))

        def failing():
            yield message(7)
            raise OSError("no space left")

        with pytest.raises(OSError, match="no space left"):
            journal.replace(failing())
        journal.append(message(8))
    assert os.listdir(tmp_path) == ["journal"]
    with Journal(path) as journal:
        assert numbers(journal) == [5, 6, 8]


def test_writer_that_died_while_it_replaced_leaves_the_old_one(tmp_path) -> None:
    path = tmp_path / "journal"
    write(path, 2)
    path.with_suffix(".new").write_bytes(b"half")
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1]
    assert os.listdir(tmp_path) == ["journal"]


def test_append_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch) -> None:
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append(message(1))
        fsync = os.fsync

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            journal.append(message(2))
        monkeypatch.setattr(os, "fsync", fsync)
        journal.append(message(3))
    with Journal(path) as journal:
        assert numbers(journal) == [1, 3]


def test_disk_that_is_full_in_the_middle_of_a_record_leaves_the_journal_as_it_was(tmp_path) -> None:
    """Neither half a record nor something buffered may come before the next one."""
    path = tmp_path / "journal"
    with Journal(path) as journal:
        journal.append(message(1))
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size_bytes + 150, limits[1]))
        try:
            for _ in range(2):
                with pytest.raises(OSError, match="File too large"):
                    journal.append(message(50))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        journal.append(message(3))
    with Journal(path) as journal:
        assert numbers(journal) == [1, 3]
