"""Sandboxes: leftovers are found, and nothing outlives them. Run as a program, it leaves some."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.unit.launch.waiting import until
from validation.chaos.sandbox import enter, entering, why_impossible

_ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(bool(why_impossible()), reason=why_impossible() or "possible")
def test_leftovers_are_found() -> None:
    ended = subprocess.run(
        entering(_ROOT, "validation.chaos.test_sandbox"), capture_output=True, text=True, cwd=_ROOT
    )
    assert ended.returncode == 0, ended.stderr
    before, after, killed = json.loads(ended.stdout)
    assert before == []
    assert sorted(after) == ["/dev/shm/left", "/tmp/folder/left", "process sleep 1000"]
    assert killed == ["/dev/shm/left", "/tmp/folder/left"]
    assert not Path("/dev/shm/left").exists()


def _leave() -> None:
    sandbox = enter()
    before = sandbox.leftovers()
    sandbox.start(["sleep", "1000"])
    until(lambda: "sleep 1000" in sandbox.processes().values())
    Path("/dev/shm/left").touch()
    Path("/tmp/folder").mkdir()
    Path("/tmp/folder/left").touch()
    (sandbox.home / ".keras").mkdir()
    (sandbox.home / ".keras" / "keras.json").touch()  # allowed: Keras writes it
    after = sandbox.leftovers()
    sandbox.kill_all()
    killed = sandbox.leftovers()
    sandbox.remove()
    print(json.dumps([before, after, killed]))


if __name__ == "__main__":
    _leave()
