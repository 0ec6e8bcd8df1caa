"""Soak of workers in lockstep: one is killed every two minutes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from stratagem.launch.prefork.server_program import PROGRAM
from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from validation.soak.sampling import Sampler, processes_below

__all__ = ["soak_lockstep"]

_NUM_WORKERS = 2
_END_S = 120.0
_FORK_SERVER = PROGRAM.partition("\n")[0]


def soak_lockstep(
    folder: Path, duration_s: float, kill_every_s: float, report: Callable[[str], None]
) -> dict[str, object]:
    """Trains for `duration_s`; returns the number of kills, steps and the goodput."""
    command = [sys.executable, "-m", "stratagem", "launch", "--workers", str(_NUM_WORKERS)]
    command += ["--max-restarts", "1000000", "--run-dir", str(folder / "run")]
    command += [str(Path(__file__).with_name("lockstep_program.py")), str(folder)]
    # Not the run's folder: its events have a file for each start.
    sampler = Sampler(folder / "samples.jsonl", [Path("/dev/shm"), folder / "backup"])
    num_kills, next_kill_s = 0, kill_every_s
    with (
        (folder / "output.log").open("wb") as output,
        subprocess.Popen(command, stdout=output, stderr=output) as launcher,
    ):
        while sampler.time_s < duration_s:
            if launcher.poll() is not None:
                raise RuntimeError(f"The launcher ended with {launcher.returncode}: see {folder}.")
            sampler.sample(_roles(launcher.pid, folder))
            if sampler.time_s >= next_kill_s:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    os.kill(_worker(folder, random.randrange(_NUM_WORKERS)), signal.SIGKILL)
                    num_kills += 1
                next_kill_s += kill_every_s
            report(f"{num_kills} kills, {_steps(folder)} steps")
            time.sleep(min(5.0, kill_every_s / 4))
        (folder / "end").touch()
        code = launcher.wait(_END_S)
    sampler.close()
    goodput = account_for(read_run(folder / "run")).as_dict()
    return {"kills": num_kills, "steps": _steps(folder), "exit_code": code, "goodput": goodput}


def _roles(launcher: int, folder: Path) -> dict[str, int]:
    roles = {"launcher": launcher}
    for rank in range(_NUM_WORKERS):
        with contextlib.suppress(FileNotFoundError, ValueError):
            roles[f"worker {rank}"] = _worker(folder, rank)
    for pid, (parent, command) in processes_below(launcher).items():
        if "guardian" in command:
            roles["guardian"] = pid
        elif parent == launcher and _FORK_SERVER in command:  # a forked task has it, too
            roles["fork server"] = pid
    return roles


def _worker(folder: Path, rank: int) -> int:
    return int((folder / f"worker-{rank}.pid").read_text())


def _steps(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError, ValueError):
        return int((folder / "steps-0").read_text())
    return 0
