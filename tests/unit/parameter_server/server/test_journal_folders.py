"""Journals that no run uses any more."""

from __future__ import annotations

import os
from pathlib import Path

from stratagem.group.transport import journal_folders as module
from stratagem.group.transport.journal_folders import remove_journal, sweep_journals
from stratagem.group.transport.journal_lock import JournalLock


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
