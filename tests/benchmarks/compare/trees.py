"""Folders that stand in for revisions: each has a worker of its own speed."""

from __future__ import annotations

from pathlib import Path

from benchmarks.compare.revisions import Tree

__all__ = ["make_tree"]

_WORKER = """
import json, sys
epoch_s = {epoch_s}
def answer(**fields):
    print("benchmark-answer " + json.dumps(fields), flush=True)
answer(versions={{}}, device_kind="fake")
for line in sys.stdin:
    count = json.loads(line)["epochs"]
    if {dies}:
        sys.exit("out of memory")
    answer(seconds=count * epoch_s, steps=count, loss=1.0)
"""


def make_tree(folder: Path, epoch_s: float, *, dies: bool = False) -> Tree:
    """Writes a tree whose worker says that an epoch takes `epoch_s`."""
    package = folder / "tests" / "benchmarks"
    package.mkdir(parents=True)
    for init in (package.parent, package):
        (init / "__init__.py").touch()
    (package / "fake_worker.py").write_text(_WORKER.format(epoch_s=epoch_s, dies=dies))
    return Tree(folder.name, folder)
