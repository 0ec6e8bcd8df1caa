"""Checkpoints in files: what is left of one that could not be written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from stratagem.checkpoint.storage import files


def test_what_is_still_written_after_a_failure_is_removed(tmp_path, monkeypatch) -> None:
    left = tmp_path / "ckpt.orbax-checkpoint-tmp-7"
    left.mkdir()
    remove, removed = shutil.rmtree, []

    def remove_beside_a_writer(folder: Path, **options: Any) -> None:
        remove(folder, **options)
        removed.append(folder)
        if len(removed) < 3:  # a thread of Orbax makes it again
            folder.mkdir()

    monkeypatch.setattr(files.shutil, "rmtree", remove_beside_a_writer)
    files._remove_unfinished(tmp_path / "ckpt")
    assert not left.exists()
    assert removed == [left] * 3
