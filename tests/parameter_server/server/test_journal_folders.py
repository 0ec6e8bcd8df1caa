"""Journals of runs: nothing is left of a run that ended, and later of one that was killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stratagem.parameter_server.server import journal_folders as module
from stratagem.parameter_server.server.journal_folders import (
    RunFolder,
    remove_journal,
    sweep_journals,
)
from stratagem.parameter_server.server.journal_lock import JournalLock

_PROGRAM = """
import sys, tempfile
tempfile.tempdir = sys.argv[1]
from stratagem.parameter_server.server.journal_folders import RunFolder
folder = RunFolder()
(folder.path / "server-0.journal").write_bytes(b"x" * 1000)
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def age(path: Path, age_s: float) -> None:
    changed_s = path.stat().st_mtime - age_s
    for one in (*path.iterdir(), path):
        os.utime(one, (changed_s, changed_s))


def test_folder_of_a_run_is_private_and_gone_after_it(base) -> None:
    with RunFolder() as folder:
        assert folder.path.parent == base
        assert folder.path.stat().st_mode & 0o777 == 0o700
        (folder.path / "server-0.journal").write_bytes(b"x")
    assert list(base.iterdir()) == []
    folder.close()


def test_next_run_removes_the_folder_of_a_killed_one_only(base) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(base)]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed = processes[0]
    folders = [Path(str(one.stdout and one.stdout.readline()).strip()) for one in processes]
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    try:
        with RunFolder():
            assert folders[0].exists()  # too young: it may not have its lock yet
        for folder in folders:
            age(folder, module._LEAST_AGE_S + 1)
        other = base / "stratagem-other"
        other.mkdir()
        age(other, 1e6)
        with RunFolder() as own:
            assert {*base.iterdir()} == {own.path, folders[1], other}
            assert (folders[1] / "server-0.journal").stat().st_size == 1000
    finally:
        for process in processes:
            process.communicate()


def test_folder_of_another_user_is_left_alone(base, monkeypatch) -> None:
    left = base / f"{module._PREFIX}x"
    left.mkdir()
    age(left, 1e6)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with RunFolder():
        assert left.exists()
    monkeypatch.undo()


def test_link_is_not_followed(base) -> None:
    precious = base / "precious"
    precious.mkdir()
    age(precious, 1e6)
    (base / f"{module._PREFIX}x").symlink_to(precious)
    with RunFolder():
        assert precious.exists()


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
