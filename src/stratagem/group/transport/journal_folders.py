"""Removal of journals that no run uses any more."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path

from stratagem.resources import are_free, own_folders

# A server that died may be about to restart, and its coordinator may be on another machine.
_ABANDONED_S = 24 * 3600.0


def remove_journal(journal: Path) -> None:
    """Removes a journal that no later run uses, its lock, and folders that are then empty."""
    for path in (journal, Path(f"{journal}.lock")):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # other servers use them
        journal.parent.rmdir()
        journal.parent.parent.rmdir()


def sweep_journals(base: Path) -> None:
    """Removes this user's journal folders in `base` that no process has used for a day."""
    for folder in own_folders(base, "*"):
        newest_s = min((_age_s(path) for path in (folder, *_files(folder))), default=0.0)
        if newest_s > _ABANDONED_S and are_free(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    with contextlib.suppress(OSError):
        return list(folder.iterdir())
    return []


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:  # removed meanwhile
        return 0.0
