"""Folders for programs and memory: gone with the launcher, or with the next one."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.launch.plan import task_plan as module
from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.plan.task_plan import make_restart_folders


@pytest.fixture
def bases(tmp_path, monkeypatch) -> tuple[Path, Path]:
    """Instead of the temporary folder and of /dev/shm."""
    files, memory = tmp_path / "files", tmp_path / "memory"
    for folder in (files, memory):
        folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(files))
    monkeypatch.setattr(module, "_MEMORY", str(memory))
    return files, memory


def test_folders_exist_during_a_launch_with_restarts_only(bases) -> None:
    with make_restart_folders(LaunchOptions(max_restarts=1), {}) as made:
        assert [Path(str(one)).parent for one in (made.programs, made.memory)] == [*bases]
        Path(str(made.programs), "program").touch()
    with make_restart_folders(LaunchOptions(), {}) as made:
        assert made.variables == {}
    assert [list(base.iterdir()) for base in bases] == [[], []]


def test_folders_of_a_killed_launcher_are_removed_by_the_next(bases) -> None:
    left = [
        base / f"stratagem-{kind}-x"
        for base, kind in zip(bases, ("programs", "memory"), strict=True)
    ]
    for folder in left:
        folder.mkdir()
        (folder / "owner.lock").touch()  # free, as after the death of its owner
    with make_restart_folders(LaunchOptions(max_restarts=1), {}):
        assert not any(folder.exists() for folder in left)
