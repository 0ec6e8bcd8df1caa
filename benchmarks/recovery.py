"""`recovery`: how soon a killed training goes on, beside PyTorch's elastic launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.report import make_row_of_times
from benchmarks.runner import Run, WorkerError
from benchmarks.sides import ROOT, Environments, Side, worker_side
from benchmarks.workers.protocol import StepLine, read_steps
from benchmarks.workloads import WORKLOADS

_NUM_WORKERS = 4
_MAX_RESTARTS = 20
# After the first, what restarts are forked from is there; sides without it do not wait for it.
_WARM_S, _COLD_S, _BETWEEN_S, _SMALLEST_S = 40.0, 15.0, 6.0, 5.0
_MAX_KILLS, _BRIEF_KILLS = 5, 2
_LIMIT_S = 120.0

_OURS = worker_side("Stratagem", "recovering_fit")
_COLD = worker_side("Stratagem, cold restarts", "recovering_fit")
_PEER = worker_side("torchrun, DDP", "recovering_ddp", "peers")


@dataclasses.dataclass(frozen=True)
class Kill:
    """A process was killed: when, which rank, and its id."""

    time_s: float
    rank: int
    process_id: int


def costs_of(kills: Sequence[Kill], steps: Sequence[StepLine]) -> list[tuple[float, int]]:
    """Returns for each kill the seconds to the next completed step of a process that was started
    after it, and how many completed steps had to be done again.

    Args:
        kills: in their order.
        steps: that were told, the earliest first."""
    found: list[tuple[float, int]] = []
    for kill in kills:
        before = [step for step in steps if step.time_s <= kill.time_s]
        ids = {step.process_id for step in before}
        # What the others finish after the kill was done by nobody's new process.
        after = [step for step in steps if step.process_id not in ids]
        if not before or not after:
            raise WorkerError(f"No step was done after worker {kill.rank} was killed.")
        old = [step for step in steps if step.process_id in ids and step.time_s < after[0].time_s]
        lost = max(step.step for step in old) - (after[0].step - 1)
        found.append((after[0].time_s - kill.time_s, max(0, lost)))
    return found


def recovery(run: Run) -> None:
    """Kills workers of an MLP, one side after the other: all of them use both cores."""
    sides = [_COLD, _COLD] if run.effort.is_smallest else [_OURS, _COLD, _PEER]
    costs: list[tuple[Side, list[tuple[float, int]]]] = []
    with tempfile.TemporaryDirectory() as parent:
        base = Path(parent)
        # As many steps an epoch as in the other benchmarks, for all workers together.
        mlp = WORKLOADS["mlp"]
        data = dataclasses.replace(mlp, batch_size=_NUM_WORKERS * mlp.batch_size).arrays()
        for name, array in zip("xy", data, strict=True):
            np.save(base / f"{name}.npy", array)
        for number, side in enumerate(filter(run.can_run, sides)):
            with run.failing(side.name), run.console.status(side.name):
                folder = base / str(number)
                folder.mkdir()
                told = _train(side, folder, run.environments, _pauses_s(side, run))
                costs.append((side, costs_of(*told)))
    if not costs or costs[0][0] is not sides[0]:
        return
    ours = costs[0][1]
    for side, theirs in costs[1:]:
        count = min(len(ours), len(theirs))
        times = [[time_s for time_s, _ in one[:count]] for one in (ours, theirs)]
        row = make_row_of_times(f"SIGKILL of one of {_NUM_WORKERS} workers", *times, side.name)
        row["details"] = {
            "worst, s": [max(one) for one in times],
            "steps lost": [max(lost for _, lost in one) for one in (ours, theirs)],
        }
        run.rows.append(row)


def _pauses_s(side: Side, run: Run) -> list[float]:
    if run.effort.is_smallest:
        return [_SMALLEST_S]
    num_kills = min(max(run.effort.num_rounds, 3), _MAX_KILLS)
    num_kills = _BRIEF_KILLS if run.effort.is_brief else num_kills
    return [_WARM_S if side is _OURS else _COLD_S, *[_BETWEEN_S] * (num_kills - 1)]


def _train(
    side: Side, folder: Path, environments: Environments, pauses_s: Sequence[float]
) -> tuple[list[Kill], list[StepLine]]:
    """Trains while processes are killed: so long after the begin, or the step before."""
    kills: list[Kill] = []
    begin_s = time.time()
    memory = "/dev/shm" if sys.platform == "linux" else None
    with tempfile.TemporaryDirectory(dir=memory) as memory_dir:
        batch_size = _NUM_WORKERS * WORKLOADS["mlp"].batch_size
        options = {"folder": str(folder), "memory_dir": memory_dir, "batch_size": batch_size}
        command = _command(side, folder, environments, json.dumps(options))
        with _launched(command, folder, environments.variables(side)) as launcher:
            _wait_for_step(launcher, folder, set())
            for number, pause_s in enumerate(pauses_s):
                time.sleep(pause_s if kills else max(0.0, begin_s + pause_s - time.time()))
                known = {one.rank: one.process_id for one in read_steps(folder)}
                rank = number % _NUM_WORKERS  # worker 0 is the first
                kills.append(Kill(time.time(), rank, known[rank]))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(known[rank], signal.SIGKILL)
                _wait_for_step(launcher, folder, {one.process_id for one in read_steps(folder)})
            time.sleep(1.0)
    return kills, read_steps(folder)


def _command(side: Side, folder: Path, environments: Environments, options: str) -> list[str]:
    script = str(ROOT / f"{side.module.replace('.', '/')}.py")
    if side is _PEER:
        launcher = [str(environments.peers), "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(_NUM_WORKERS)]
    else:
        launcher = [str(environments.ours.with_name("stratagem")), "launch"]
        launcher += ["--workers", str(_NUM_WORKERS), "--run-dir", str(folder / "run")]
        launcher += ["--cold-restarts"] if side is _COLD else []
    return [*launcher, "--max-restarts", str(_MAX_RESTARTS), script, options]


@contextlib.contextmanager
def _launched(
    command: list[str], folder: Path, variables: dict[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=variables
        )
        try:
            yield launcher
        finally:
            launcher.terminate()  # it ends what it has started
            try:
                launcher.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _wait_for_step(launcher: subprocess.Popen[bytes], folder: Path, known: set[int]) -> None:
    """Waits until a process that was not known has done a step."""
    deadline = time.monotonic() + _LIMIT_S
    while all(one.process_id in known for one in read_steps(folder)):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise WorkerError((folder / "log").read_text("utf-8", errors="replace")[-3000:])
        time.sleep(0.2)
