"""Journals: what was appended is there, whenever the writer died."""

from __future__ import annotations

import os
import resource
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from stratagem.errors import DataLossError
from stratagem.parameter_server.server.journal import Journal
from stratagem.parameter_server.transport.wire import Message


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


def test_unfinished_record_is_cut_off_wherever_the_writer_died(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with Journal(path) as journal:
            wanted = list(range(sum(size >= one for one in sizes[1:])))
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
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1]


def test_record_that_was_changed_is_reported(tmp_path) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3)
    data = bytearray(path.read_bytes())
    data[sizes[1] + 30] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        DataLossError, match=f"the checksum of the record at byte {sizes[1]} is wrong"
    ):
        Journal(path)
    assert path.read_bytes() == bytes(data)  # left as it is


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
