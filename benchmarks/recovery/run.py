"""Runs the benchmark: workers of an MLP that are killed, and a longer run with two kills."""

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
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.cases import Environments, Side, whole_side
from benchmarks.machine import describe_machine
from benchmarks.recovery.report import Recovery, draw_recoveries, make_table
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.worker_process import WorkerError
from benchmarks.workers.step_lines import StepLine, read_steps
from benchmarks.workloads import WORKLOADS
from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.report_page import draw
from stratagem.observe.terminal import show_account

__all__ = ["Kill", "SIDES", "kills_of", "run_recovery"]

_REPOSITORY = Path(__file__).parents[2]
_NUM_WORKERS = 4
_MAX_RESTARTS = 20
# After the first, what restarts are forked from is there; sides without it do not wait for it.
_WARM_S, _COLD_S, _BETWEEN_S = 40.0, 15.0, 6.0
_MAX_KILLS, _BRIEF_KILLS = 5, 2
_LIMIT_S = 120.0
_RUN_S, _BRIEF_RUN_S, _LONG_RUN_S = 90.0, 45.0, 600.0
_LONG_RUN = "long run"


SIDES = (
    whole_side("Stratagem", "recovering_fit"),
    whole_side("Stratagem, cold", "recovering_fit"),
    whole_side("torchrun, DDP", "recovering_ddp", environment="peers"),
)


@dataclasses.dataclass(frozen=True)
class Kill:
    """A process was killed.

    Args:
        time_s: when.
        rank: which one.
        process_id: its id.
    """

    time_s: float
    rank: int
    process_id: int


def kills_of(kills: list[Kill], steps: list[StepLine]) -> list[tuple[float, int]]:
    """Says what each kill has cost.

    Args:
        kills: in their order.
        steps: that were told, the earliest first.

    Returns:
        For each, how long it took from the kill to the next completed step of a process that was
        started after it, and how many completed steps had to be done again.

    Raises:
        WorkerError: no step was done after one.
    """
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


def run_recovery(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_smallest: bool = False,
) -> bool:
    """Measures, prints tables and writes figures and plots.

    Args:
        environments: where the sides run.
        effort: how often to kill.
        console: of the tables.
        output: folder of the results.
        only: sides whose name contains this, or "long run" for one of ten minutes alone.
        is_smallest: a kill a side, soon, and a short run.

    Returns:
        Whether all went well.
    """
    results: list[Recovery] = []
    account: dict[str, Any] | None = None
    failures: list[dict[str, str]] = []

    def failed(name: str, error: WorkerError) -> None:
        failures.append({"case": name, "error": str(error)})
        console.print(f"Failed: {name}\n{error}", style="red", markup=False)

    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        for array, path in zip(_data(), ("x", "y"), strict=True):
            np.save(base / f"{path}.npy", array)
        sides = [side for side in SIDES if only in side.name]
        for place, side in enumerate(sides):
            if reason := environments.why_not(side):
                console.print(f"Skipped: {side.name}: {reason}.")
                continue
            pauses_s = [5.0] if is_smallest else _pauses_s(side, effort)
            try:
                with console.status(side.name):
                    told = _train(side, _folder(base, str(place)), environments, pauses_s)
                results.append(Recovery(side.name, kills_of(*told)))
            except WorkerError as error:
                failed(side.name, error)
        if results:
            console.print(make_table(_NUM_WORKERS, results))
        if SIDES[0] in sides or only == _LONG_RUN:
            run_s = _LONG_RUN_S if only == _LONG_RUN else _RUN_S
            run_s = _BRIEF_RUN_S if is_smallest or effort.is_brief else run_s
            try:
                account = _long_run(base, environments, console, output, run_s)
            except WorkerError as error:
                failed(_LONG_RUN, error)
    _write(console, output, results, account, failures)
    return not failures


def _write(
    console: Console,
    output: Path,
    results: list[Recovery],
    account: dict[str, Any] | None,
    failures: list[dict[str, str]],
) -> None:
    machine = describe_machine(None)
    rows = [dataclasses.asdict(one) for one in results]
    told = {"workers": _NUM_WORKERS, "machine": machine, "failures": failures}
    write_json(
        output / "recovery.json",
        {"benchmark": "recovery", **told, "rows": rows, "long_run": account},
    )
    if results:
        measured_on = f"{machine['cpu']}, {machine['cores']} cores"
        draw_recoveries(output / "recovery.png", _NUM_WORKERS, results, measured_on)
    console.print(f"Results and plots: {output / 'recovery'}*.json, .png", soft_wrap=True)


def _pauses_s(side: Side, effort: Effort) -> list[float]:
    num_kills = _BRIEF_KILLS if effort.is_brief else min(max(effort.num_rounds, 3), _MAX_KILLS)
    first_s = _WARM_S if side is SIDES[0] else _COLD_S
    return [first_s, *[_BETWEEN_S] * (num_kills - 1)]


def _data() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """As many steps an epoch as in the other benchmarks, for all workers together."""
    workload = WORKLOADS["mlp"]
    return dataclasses.replace(workload, batch_size=_NUM_WORKERS * workload.batch_size).arrays()


def _folder(base: Path, name: str) -> Path:
    folder = base / name
    folder.mkdir()
    for path in ("x.npy", "y.npy"):
        (folder / path).symlink_to(base / path)
    return folder


def _long_run(
    base: Path, environments: Environments, console: Console, output: Path, run_s: float
) -> dict[str, Any]:
    folder = _folder(base, "long")
    with console.status(f"a run of {run_s:.0f} s with two kills"):
        _train(
            SIDES[0],
            folder,
            environments,
            [run_s / 3, run_s / 3],
            run_s=run_s,
            steps_per_call=WORKLOADS["mlp"].cpu_steps_per_call,
            save_freq=10 * WORKLOADS["mlp"].steps_per_epoch,  # on disk, three quarters of a minute
            memory_save_freq="auto",
        )
    run = read_run(folder / "run")
    account = account_for(run)
    show_account(account, console)
    draw(run, output / "recovery_goodput.png")
    return account.as_dict()


def _train(
    side: Side,
    folder: Path,
    environments: Environments,
    pauses_s: Sequence[float],
    *,
    run_s: float | None = None,
    **options: Any,
) -> tuple[list[Kill], list[StepLine]]:
    """Trains while processes are killed: so long after the begin, or the step before."""
    kills: list[Kill] = []
    begin_s = time.time()
    with tempfile.TemporaryDirectory(dir=_memory()) as memory_dir:
        told: dict[str, Any] = {
            "folder": str(folder),
            "memory_dir": memory_dir,
            "batch_size": _NUM_WORKERS * WORKLOADS["mlp"].batch_size,
            "end_s": begin_s + (10**9 if run_s is None else run_s),
            "steps_per_call": 1,
            "save_freq": "epoch",
            "memory_save_freq": 1,
        }
        command = _command(side, folder, environments, json.dumps({**told, **options}))
        with _launched(command, folder, environments.variables(side)) as launcher:
            _wait_for_step(launcher, folder, set())
            for place, pause_s in enumerate(pauses_s):
                time.sleep(pause_s if kills else max(0.0, begin_s + pause_s - time.time()))
                known = {one.rank: one.process_id for one in read_steps(folder)}
                rank = place % _NUM_WORKERS  # worker 0 is the first
                process_id = known[rank]
                kills.append(Kill(time.time(), rank, process_id))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
                known_ids = {one.process_id for one in read_steps(folder)}
                _wait_for_step(launcher, folder, known_ids)
            if run_s is None:
                time.sleep(1.0)
            elif launcher.wait(max(1.0, begin_s + run_s + _LIMIT_S - time.time())):
                raise WorkerError(_last_words(folder))
    return kills, read_steps(folder)


def _command(side: Side, folder: Path, environments: Environments, options: str) -> list[str]:
    script = str(_REPOSITORY / f"{side.module.replace('.', '/')}.py")
    if side.environment == "peers":
        launcher = [str(environments.peers), "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(_NUM_WORKERS)]
    else:
        launcher = [str(environments.ours.with_name("stratagem")), "launch"]
        launcher += ["--workers", str(_NUM_WORKERS), "--run-dir", str(folder / "run")]
        launcher += ["--cold-restarts"] if "cold" in side.name else []
    return [*launcher, "--max-restarts", str(_MAX_RESTARTS), script, options]


def _memory() -> str | None:
    return "/dev/shm" if sys.platform == "linux" else None


@contextlib.contextmanager
def _launched(
    command: list[str], folder: Path, variables: Mapping[str, str]
) -> Generator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        launcher = subprocess.Popen(
            command,
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
                launcher.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                launcher.kill()
                launcher.wait()


def _wait_for_step(launcher: subprocess.Popen[bytes], folder: Path, known: set[int]) -> None:
    """Waits until a process that was not known has done a step."""
    deadline = time.monotonic() + _LIMIT_S
    while all(one.process_id in known for one in read_steps(folder)):
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise WorkerError(_last_words(folder))
        time.sleep(0.2)


def _last_words(folder: Path) -> str:
    return (folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
