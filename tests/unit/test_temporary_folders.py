"""Temporary folders: nothing is left of a process that ended, or of a killed one after the next."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem import resources as module
from stratagem.resources import TemporaryFolder

PREFIX = "stratagem-x-"
PROGRAM = f"""
import sys
from stratagem.resources import TemporaryFolder
folder = TemporaryFolder("{PREFIX}", sys.argv[1])
(folder.path / "content").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
sys.stdin.read()
"""


def age(path: Path, by_s: float = module._ABANDONED_S + 1) -> None:
    changed_s = path.stat().st_mtime - by_s
    os.utime(path, (changed_s, changed_s))


def test_folder_is_private_and_gone_when_it_is_closed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with TemporaryFolder(PREFIX) as folder:
        assert folder.path.parent == tmp_path
        assert folder.path.name.startswith(PREFIX)
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "content").write_bytes(b"x")
    assert list(tmp_path.iterdir()) == []
    folder.close()


def test_next_process_removes_at_once_the_folder_of_a_killed_one_only(tmp_path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = [Path(str(one.stdout and one.stdout.readline()).strip()) for one in processes]
    processes[0].send_signal(signal.SIGKILL)
    processes[0].wait()
    other = tmp_path / f"{PREFIX}other"  # not made by this module
    other.mkdir()
    age(other)
    try:
        with TemporaryFolder(PREFIX, tmp_path) as own, TemporaryFolder("z-", tmp_path) as foreign:
            assert {*tmp_path.iterdir()} == {own.path, foreign.path, folders[1], other}
            assert (folders[1] / "content").stat().st_size == 1000
    finally:
        for process in processes:
            process.communicate()
    assert list(tmp_path.iterdir()) == [other]


def test_folder_without_a_lock_yet_is_removed_later(tmp_path) -> None:
    """Of a process that was killed before it gave the folder its name."""
    names = ("old", "future", "locked", "young")
    unnamed = [tmp_path / f"{module._UNNAMED}{PREFIX}{name}" for name in names]
    for folder in unnamed:
        folder.mkdir()
    with open(unnamed[2] / module._OWNER, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in unnamed[:3]:
            age(folder)
        age(unnamed[1], -4 * module._ABANDONED_S)  # the clock was set back since
        TemporaryFolder(PREFIX, tmp_path).close()
    assert sorted(tmp_path.iterdir()) == unnamed[2:]


def test_folder_of_another_user_is_left_alone(tmp_path, monkeypatch) -> None:
    left = tmp_path / f"{PREFIX}left"
    left.mkdir()
    (left / module._OWNER).touch()
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    TemporaryFolder(PREFIX, tmp_path).close()
    assert left.exists()
    monkeypatch.undo()
    TemporaryFolder(PREFIX, tmp_path).close()
    assert not left.exists()


def test_link_is_not_followed(tmp_path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / module._OWNER).touch()
    (tmp_path / f"{PREFIX}link").symlink_to(precious)
    TemporaryFolder(PREFIX, tmp_path).close()
    assert (precious / module._OWNER).exists()


def test_file_system_without_locks_leaves_nothing(tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="not supported"):
        TemporaryFolder(PREFIX, tmp_path)
    assert list(tmp_path.iterdir()) == []
