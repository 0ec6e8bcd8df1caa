"""Trees of two revisions, and how to run a benchmark's workers from either."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import Environments, Side
from benchmarks.worker_process import WorkerProcess

__all__ = ["HEAD", "Tree", "check_out", "commit_of"]

_REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Tree:
    """Files of a revision.

    Args:
        name: the revision's name, for tables.
        folder: repository root.
    """

    name: str
    folder: Path

    def start(
        self, side: Side, argument: str, environments: Environments, **variables: str
    ) -> WorkerProcess:
        """Starts a worker of this tree, with this tree's `stratagem` and `benchmarks`."""
        paths = [str(self.folder / "src"), str(self.folder)]
        own = {"PYTHONPATH": os.pathsep.join(paths), **variables}
        return WorkerProcess(
            f"{side.name} at {self.name}",
            [str(environments.ours), "-m", side.module, argument],
            {**environments.variables(side), **own},
            self.folder,
        )


HEAD = Tree("working tree", _REPOSITORY)


def commit_of(revision: str) -> str:
    """Returns the hash of a commit, branch or tag.

    Raises:
        ValueError: there is no such revision.
    """
    found = _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode:
        raise ValueError(
            f"{revision!r} is no revision of this repository. Expected: a commit, branch or tag. "
            "Fix: `git fetch` it first, or choose one that `git log` lists."
        )
    return found.stdout.strip()


@contextlib.contextmanager
def check_out(commit: str) -> Generator[Tree]:
    """Yields the tree of a commit in a temporary Git worktree."""
    with tempfile.TemporaryDirectory(prefix="stratagem-base-") as parent:
        folder = Path(parent) / commit[:12]
        _git("worktree", "add", "--detach", "--quiet", str(folder), commit, check=True)
        try:
            yield Tree(commit[:10], folder)
        finally:
            _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    command = ["git", "-C", str(_REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=check)
