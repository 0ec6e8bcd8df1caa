"""Training that is killed again and again ends as one that never was, bit for bit."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS

_PROGRAM = str(PROGRAMS / "killed.py")
_NUM_STEPS, _NUM_KILLS = 200, 20
_LIMIT_S = 1500
_LATEST_S = 0.05


def _now(folder: Path, num_workers: int) -> list[tuple[int, int]]:
    """Process and step of each worker that has begun."""
    found: list[tuple[int, int]] = []
    for rank in range(num_workers):
        with contextlib.suppress(FileNotFoundError):
            content = (folder / f"now-{rank}").read_bytes()
            if len(content) == 16:
                found.append(struct.unpack("<QQ", content))
    return found


def _run(
    how: str, num_workers: int, folder: Path, targets: Sequence[int] = (), seed: int = 0
) -> int:
    """Trains to the end; kills a process soon after each target step. Returns how many kills."""
    folder.mkdir()
    stratagem = str(Path(sys.executable).with_name("stratagem"))
    command = [stratagem, "launch", "--workers", str(num_workers), "--max-restarts", "40"]
    chance, killed = random.Random(seed), set[int]()
    with (folder / "launch.log").open("w") as log:
        launcher = subprocess.Popen([*command, _PROGRAM, how, str(folder)], stdout=log, stderr=log)
        deadline = time.monotonic() + _LIMIT_S
        try:
            for target in targets:
                while launcher.poll() is None:
                    assert time.monotonic() < deadline, (folder / "launch.log").read_text()
                    now = _now(folder, num_workers)
                    alive = [pid for pid, step in now if step >= target and pid not in killed]
                    if len(now) == num_workers and len(alive) == num_workers:
                        time.sleep(chance.random() * _LATEST_S)  # into a step, or a save
                        victim = chance.choice(alive)
                        killed.update(alive)
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(victim, signal.SIGKILL)
                        break
                    time.sleep(0.001)
            code = launcher.wait(max(1.0, deadline - time.monotonic()))
        finally:
            launcher.kill()
            launcher.wait()
    assert code == 0, (folder / "launch.log").read_text()
    return (folder / "launch.log").read_text().count("Starting all tasks again")


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("how", ["fit", "loop"])
def test_killed_at_twenty_random_moments(how: str, num_workers: int, tmp_path: Path) -> None:
    assert _run(how, num_workers, tmp_path / "undisturbed") == 0
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    chance = random.Random(seed)
    span = (_NUM_STEPS - 10) // _NUM_KILLS
    targets = [span * index + chance.randrange(1, span + 1) for index in range(_NUM_KILLS)]
    num_restarts = _run(how, num_workers, tmp_path / "killed", targets, seed)
    assert num_restarts == _NUM_KILLS
    wanted = dict(np.load(tmp_path / "undisturbed" / "end.npz"))
    got = dict(np.load(tmp_path / "killed" / "end.npz"))
    examples = wanted.pop("examples")
    # Every epoch has all examples once.
    for epoch in examples.reshape(_NUM_STEPS // 25, -1):
        assert sorted(epoch[epoch > 0]) == list(range(1, 301))
    np.testing.assert_array_equal(got.pop("examples"), examples)
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)
