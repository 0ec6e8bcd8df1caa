"""Runs the benchmark: a training whose workers are killed and join again, and its replay."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cases import Environments, whole_side
from benchmarks.machine import describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.survivors.figures import Step, changes_of, figures_of, read_steps
from benchmarks.worker_process import WorkerError
from benchmarks.workloads import WORKLOADS

__all__ = ["run_survivors"]

_REPOSITORY = Path(__file__).parents[2]
_SIDE = whole_side("Stratagem", "survivor_fit")
_NUM_WORKERS = 3
# Seconds of the run, between kills, and least of a step.
_TIMES_S, _BRIEF_TIMES_S = (3600.0, 36.0, 0.1), (60.0, 15.0, 0.1)
_LIMIT_S = 600.0
_NO_STEP = Step(0, 0.0, ())


def run_survivors(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints figures and writes them.

    Args:
        environments: where the training runs.
        effort: a brief one is a minute long.
        console: of the figures.
        output: folder of the results.
        only: seconds of the run, between kills, and least of a step, such as "600/6/0"; "" for an
            hour, 36 and 0.1.
        is_smallest: a run of a minute.

    Returns:
        Whether all went well: a replay of the participants has the same bits.
    """
    is_brief = is_smallest or effort.is_brief
    run_s, between_s, step_s = _BRIEF_TIMES_S if is_brief else _TIMES_S
    if "/" in only:
        run_s, between_s, step_s = map(float, only.split("/"))
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        try:
            first, again = _run_twice(base, environments, console, (run_s, between_s, step_s))
        except WorkerError as error:
            console.print(f"Failed: {error}", style="red", markup=False)
            return False
        figures = figures_of(read_steps(first))
        bits = [_bits(first), _bits(again)]
    is_equal = bool(bits[0]) and bits[0] == bits[1]
    console.print(figures, f"replay of {len(bits[0])} epochs: same bits: {is_equal}")
    machine = describe_machine(None)
    results = {"benchmark": "survivors", "workers": _NUM_WORKERS, "machine": machine}
    results |= {"figures": dataclasses.asdict(figures), "replay_is_equal": is_equal}
    write_json(output / "survivors.json", results)
    return is_equal


def _run_twice(
    base: Path, environments: Environments, console: Console, times_s: tuple[float, float, float]
) -> tuple[Path, Path]:
    run_s, between_s, step_s = times_s
    with console.status(f"a run of {run_s:.0f} s with a kill each {between_s:.0f} s"):
        first = _folder(base, "first")
        with _launched(first, environments, step_s=step_s) as launcher:
            _kill_workers(first, launcher, run_s, between_s)
            (first / "stop").touch()
            _await_end(first, launcher, time.time() + _LIMIT_S)
    kills, joins = changes_of(read_steps(first))
    with console.status(f"the replay of {len(kills)} kills and {len(joins)} joins"):
        again = _folder(base, "again")
        changes = {"kills": kills, "joins": joins, "epochs": len(_bits(first))}
        with _launched(again, environments, **changes) as launcher:
            _await_end(again, launcher, time.time() + 3 * run_s + _LIMIT_S)
    return first, again


def _kill_workers(
    folder: Path, launcher: subprocess.Popen[bytes], run_s: float, between_s: float
) -> None:
    """Kills a worker at random from time to time, while all train."""
    chance = random.Random(1)
    _await_all(folder, launcher)
    begun_s = time.time()
    for number in range(1, int(run_s / between_s) + 1):
        due_s = begun_s + number * between_s + chance.uniform(-0.2, 0.2)
        time.sleep(max(0.0, due_s - time.time()))
        _await_all(folder, launcher)  # on a busy machine a start takes longer
        _check(folder, launcher)
        pid = (folder / f"pid-{chance.randrange(_NUM_WORKERS)}").read_text(encoding="ascii")
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def _await_all(folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    while len(next(iter(read_steps(folder)[-1:]), _NO_STEP).members) < _NUM_WORKERS:
        _check(folder, launcher)
        time.sleep(0.5)


def _check(folder: Path, launcher: subprocess.Popen[bytes]) -> None:
    if launcher.poll() is not None:
        raise WorkerError((folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:])


def _await_end(folder: Path, launcher: subprocess.Popen[bytes], limit_s: float) -> None:
    try:
        code = launcher.wait(max(1.0, limit_s - time.time()))
    except subprocess.TimeoutExpired:
        code = None
    if code != 0:
        raise WorkerError((folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:])


def _folder(base: Path, name: str) -> Path:
    folder = base / name
    folder.mkdir()
    workload = WORKLOADS["mlp"]
    whole = dataclasses.replace(workload, batch_size=_NUM_WORKERS * workload.batch_size)
    for array, path in zip(whole.arrays(), ("x", "y"), strict=True):
        np.save(folder / f"{path}.npy", array)
    return folder


def _bits(folder: Path) -> dict[int, str]:
    """Returns the bits of the weights after each epoch, the same on all workers."""
    found: dict[int, str] = {}
    for path in folder.glob("bits-*"):
        for line in path.read_text(encoding="ascii").splitlines():
            epoch, bits = line.split()
            assert found.setdefault(int(epoch), bits) == bits, (path, line)
    return found


@contextlib.contextmanager
def _launched(
    folder: Path, environments: Environments, **options_of_run: Any
) -> Generator[subprocess.Popen[bytes]]:
    options: dict[str, Any] = {
        "kills": [],
        "joins": [],
        "epochs": None,
        "step_s": 0.0,
        "folder": str(folder),
    }
    options |= {"batch_size": _NUM_WORKERS * WORKLOADS["mlp"].batch_size, **options_of_run}
    script = str(_REPOSITORY / f"{_SIDE.module.replace('.', '/')}.py")
    command = [str(environments.ours.with_name("stratagem")), "launch", "--survivors"]
    command += ["--workers", str(_NUM_WORKERS), "--max-restarts", "1000000"]
    variables: Mapping[str, str] = environments.variables(_SIDE)
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [*command, script, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=_REPOSITORY,
            env={**variables, "PYTHONPATH": f"{_REPOSITORY / 'src'}{os.pathsep}{_REPOSITORY}"},
        )
        try:
            yield launcher
        finally:
            launcher.terminate()  # it ends what it has started
            try:
                launcher.wait(60)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()
