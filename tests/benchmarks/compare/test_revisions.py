"""Trees of revisions: checked out, used by their workers, and removed."""

from __future__ import annotations

import subprocess

import pytest

from benchmarks.compare.revisions import HEAD, check_out, commit_of


def test_revision_is_checked_out_and_removed() -> None:
    with check_out(commit_of("HEAD")) as tree:
        assert tree.folder != HEAD.folder
        assert (tree.folder / "src" / "stratagem" / "__init__.py").is_file()
        assert str(tree.folder) in _worktrees()
    assert not tree.folder.exists()
    assert str(tree.folder) not in _worktrees()


def test_unknown_revision() -> None:
    with pytest.raises(ValueError, match="'no-such-branch' is no revision"):
        commit_of("no-such-branch")


def _worktrees() -> str:
    command = ["git", "-C", str(HEAD.folder), "worktree", "list"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
