"""Journals: what was appended is there, whenever the writer died."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stratagem.errors import DataLossError, UnavailableError
from stratagem.group.transport import journal as module
from stratagem.group.transport.connection import Connections
from stratagem.group.transport.endpoints import ClusterKeys
from stratagem.group.transport.journal import (
    _RECORD,
    MARK,
    Journal,
    JournalLock,
    frames_in,
    remove_journal,
    sweep_journals,
)
from stratagem.group.transport.wire import Message, pack
from stratagem.parameter_server.client.client import ServerClient
from stratagem.parameter_server.client.shard_layout import ShardLayout
from stratagem.parameter_server.server.server import ParameterServer
from tests.fuzzing import JSON, fuzz
from tests.unit.parameter_server.fuzzing import damaged
from tests.unit.parameter_server.server.update_rules import Momentum


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
    path.with_suffix(".new").write_bytes(b"half")  # of a writer that died while it replaced it
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1, 2]
        journal.append(message(3))
    with Journal(path) as journal:
        assert numbers(journal) == [0, 1, 2, 3]
    assert os.listdir(path.parent) == ["journal"]


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


@pytest.mark.parametrize("is_missing", [True, False], ids=["pages are missing", "bits changed"])
def test_damaged_records_at_the_end_are_dropped_and_counted(tmp_path, is_missing) -> None:
    path = tmp_path / "journal"
    sizes = write(path, 3 if is_missing else 4)
    data = bytearray(path.read_bytes())
    if is_missing:
        data[sizes[2] + 20 :] = bytes(len(data) - sizes[2] - 20)
    else:
        for at in (sizes[2] + 30, sizes[3] + 30):
            data[at] ^= 1
    path.write_bytes(data)
    num_dropped = 1 if is_missing else 2
    with dropping(num_dropped, sizes[2]):
        journal = Journal(path)
    with journal:
        assert (numbers(journal), journal.num_dropped) == ([0, 1], num_dropped)


@pytest.mark.parametrize(
    ("place", "bits"), [*((place, 0x40) for place in range(20)), (30, 1)], ids=str
)
def test_changed_record_is_no_reason_to_drop_those_after_it(tmp_path, place, bits) -> None:
    """Of its header, and of its contents."""
    path = tmp_path / "journal"
    sizes = write(path, 3)
    data = bytearray(path.read_bytes())
    data[sizes[1] + place] ^= bits
    path.write_bytes(data)
    with pytest.raises(
        DataLossError, match=f"byte {sizes[1]} fails its checksum, after 1 intact ones"
    ):
        Journal(path)
    assert path.read_bytes() == bytes(data)


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


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"stratagem journal 2\n" + bytes(100), "has version 2 of the format"),
        (b"stratagem journal 4\n" + bytes(100), "has version 4 of the format"),
        (b"my thesis", "it is not a journal of a parameter server"),
    ],
    ids=["older", "newer", "other"],
)
def test_file_of_another_format_is_refused_and_left_alone(tmp_path, data, words) -> None:
    path = tmp_path / "journal"
    path.write_bytes(data)
    with pytest.raises(DataLossError, match=words):
        Journal(path)
    assert path.read_bytes() == data


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


# Fuzz tests of journals: what is read is what was written, or the damage is named.

_KEYS = ClusterKeys.make()


@pytest.fixture(scope="module")
def whole_journal(tmp_path_factory) -> Path:
    """A journal of all that a server writes."""
    path = tmp_path_factory.mktemp("whole_journal") / "journal"
    with (
        ParameterServer(_KEYS, journal=path, journal_interval_s=1e6) as server,
        Connections(_KEYS, [server.address]) as connections,
    ):
        client = ServerClient(connections)
        client.create(ShardLayout("v", (3,), "float32", (0,), (3,)), np.ones(3, np.float32))
        table = ShardLayout("table", (40, 2), "float32", (0,), (40,), has_rows=True)
        client.create(table, np.ones((40, 2), np.float32))
        client.set_rule(Momentum(), ["v", "table"])
        for number in range(3):
            rows = {"table": (np.array([number]), np.ones((1, 2), np.float32))}
            assert client.push({"v": np.ones(3, np.float32)}, rows).is_used
            client.journal()
    return path


@contextlib.contextmanager
def quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


@pytest.mark.slow
@fuzz
@given(data=st.data())
def test_damaged_journal_has_the_first_records_or_is_refused(whole_journal, tmp_path, data) -> None:
    path = tmp_path / "journal"
    changed = data.draw(damaged(whole_journal.read_bytes()))
    path.write_bytes(changed)
    with Journal(whole_journal) as whole:
        wanted = [[bytes(frame) for frame in pack(one)] for one in whole.messages]
    try:
        with quietly(), Journal(path) as read:
            got = [[bytes(frame) for frame in pack(one)] for one in read.messages]
            num_dropped = read.num_dropped
    except DataLossError:
        assert path.read_bytes() == changed
        return
    if changed.startswith(whole_journal.read_bytes()[:20]):
        # A record that was doubled is intact too.
        assert all(one in wanted for one in got)
    # The head of an earlier version is renewed.
    assert num_dropped or path.read_bytes()[20 : len(changed)] == changed[20:]


@fuzz
@given(data=st.data())
def test_forged_journal_is_restored_or_refused(whole_journal, tmp_path, data) -> None:
    """All of its checksums are right."""
    path = tmp_path / "journal"
    with Journal(whole_journal) as whole:
        entry = whole.messages[0]
        frames = [bytes(frame) for frame in pack(entry)]
    head = frames[0].partition(b"\0")
    header = json.loads(head[0])
    change = data.draw(st.sampled_from(["field", "part", "bytes"]))
    if change == "field":
        header["fields"][data.draw(st.sampled_from([*header["fields"]]))] = data.draw(JSON)
    elif change == "part":
        part = data.draw(st.sampled_from(header["fields"]["parts"]))
        part[data.draw(st.sampled_from([*part]))] = data.draw(JSON)
        if isinstance(part.get("spec"), dict):
            part["spec"]["shape"] = data.draw(st.lists(st.integers(-2, 2**50), max_size=3))
    frames[0] = json.dumps(header, separators=(",", ":")).encode() + head[1] + head[2]
    if change == "bytes":
        frames[0] = data.draw(damaged(frames[0]))
    lengths = struct.pack(f"<{len(frames)}Q", *map(len, frames))
    body = struct.pack("<I", len(frames)) + lengths + b"".join(frames)
    record = _RECORD.pack(MARK, len(body), zlib.crc32(body))
    whole_head = whole_journal.read_bytes()[:20]
    path.write_bytes(whole_head + record + zlib.crc32(record).to_bytes(4, "little") + body)
    with contextlib.suppress(DataLossError), quietly():
        ParameterServer(_KEYS, journal=path, journal_interval_s=1e6).close()


# Who may write a journal.

_KEEP = (
    "import sys\n"
    "from pathlib import Path\n"
    "from stratagem.group.transport.journal import JournalLock\n"
    "lock = JournalLock(Path(sys.argv[1]))\n"
    "print('there', flush=True)\n"
    "sys.stdin.read()\n"
)


def _keeper(path: Path) -> subprocess.Popen[str]:
    keeper = subprocess.Popen(
        [sys.executable, "-c", _KEEP, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert keeper.stdout is not None
    assert keeper.stdout.readline() == "there\n"
    return keeper


def test_lock_of_another_process_is_refused_until_that_one_is_killed(tmp_path, monkeypatch) -> None:
    path = tmp_path / "journal.lock"
    with _keeper(path) as keeper:
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
        with pytest.raises(UnavailableError, match="is in use by process") as raised:
            JournalLock(path)
        assert f"process {keeper.pid} on " in str(raised.value)
        monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "60")
        taken: list[JournalLock] = []
        waiting = threading.Thread(target=lambda: taken.append(JournalLock(path)))
        waiting.start()
        assert waiting.is_alive()
        keeper.kill()
        waiting.join()
        taken[0].close()
        taken[0].close()


def test_journal_is_of_one_server(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATAGEM_PEER_TIMEOUT_S", "0.1")
    keys, path = ClusterKeys.make(), tmp_path / "folder" / "server-0.journal"
    with (
        ParameterServer(keys, journal=path),
        pytest.raises(UnavailableError, match="is in use by process"),
    ):
        ParameterServer(keys, journal=path)
    ParameterServer(keys, journal=path).close()
    other = tmp_path / "server-1.journal"
    other.mkdir()  # which cannot be read, and is given free
    with pytest.raises(IsADirectoryError):
        ParameterServer(keys, journal=other)
    other.rmdir()
    ParameterServer(keys, journal=other).close()


# Journals that no run uses any more.


def age(path: Path, age_s: float) -> None:
    changed_s = path.stat().st_mtime - age_s
    for one in (*path.iterdir(), path):
        os.utime(one, (changed_s, changed_s))


def test_journal_is_removed_with_what_is_empty_then(tmp_path) -> None:
    base = tmp_path / "journals"
    journals = [base / "run" / f"server-{index}.journal" for index in range(2)]
    for journal in journals:
        JournalLock(Path(f"{journal}.lock")).close()
        journal.write_bytes(b"x")
    remove_journal(journals[0])
    assert sorted(path.name for path in journals[1].parent.iterdir()) == [
        "server-1.journal",
        "server-1.journal.lock",
    ]
    remove_journal(journals[1])
    remove_journal(journals[1])
    assert list(tmp_path.iterdir()) == []


def test_journals_that_no_process_used_for_a_day_are_removed(tmp_path) -> None:
    folders = {name: tmp_path / name for name in ("abandoned", "used", "recent")}
    for folder in folders.values():
        JournalLock(folder / "server-0.journal.lock").close()
        (folder / "server-0.journal").write_bytes(b"x")
    with JournalLock(folders["used"] / "server-0.journal.lock"):
        for folder in folders.values():
            age(folder, module._ABANDONED_S + 1)
        os.utime(folders["recent"] / "server-0.journal")
        sweep_journals(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recent", "used"]
    sweep_journals(tmp_path / "not there")
