"""Lockstep training under the launcher, which restarts it: the end is bit-identical."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from validation.chaos.faults.kinds import Fault
from validation.chaos.jobs import Ended, Outcome
from validation.chaos.sandbox import PATIENCE, Sandbox, Started

__all__ = ["Lockstep", "RunningFit", "LIMITS", "Weights"]

Weights = Mapping[str, np.ndarray[Any, Any]]

# Short, so that a trial takes seconds. A machine that exceeds them restarts the job now and then,
# which it survives; a busy one needs more of them (`CHAOS_PATIENCE`).
LIMITS = {
    f"STRATAGEM_{name}_TIMEOUT_S": str(limit_s * PATIENCE)
    for name, limit_s in {
        "PEER": 4,
        "STUCK": 10,
        "BARRIER": 20,
        "JOIN": 30,
        "SAVE": 20,
        "HANDSHAKE": 3,
    }.items()
}
_MAX_RESTARTS = 10
_RESUME_LIMIT_S = 300.0
_PROGRAM = "validation/chaos/jobs/fit.py"
_NOTICED = re.compile(r"\[launch\].*(failed|SIGTERM|SIGINT|saved and left)")
_LISTENS = re.compile(r"LISTEN\s+\S+\s+\S+\s+(\S+):(\d+)\s.*?pid=(\d+),")
_TRACEBACK_END = re.compile(r"^(\[[^]]+\] )?\w*(Error|Exception)\b", re.MULTILINE)
_TAIL_CHARACTERS = 1500


@dataclasses.dataclass
class RunningFit:
    """A launch of `fit.py`."""

    sandbox: Sandbox
    command: Sequence[str]
    variables: Mapping[str, str]
    reference: Weights
    is_exact: bool

    def __post_init__(self) -> None:
        self.started = self._start()

    def _start(self) -> Started:
        return self.sandbox.start(self.command, self.variables)

    def processes(self) -> dict[str, int]:
        """The launcher, what it started for itself, and the workers that have begun."""
        living = self.sandbox.processes()
        found = {"launcher": self.started.process.pid}
        for path in self.sandbox.notes.glob("process-*"):
            with contextlib.suppress(ValueError, OSError):
                found[f"worker {path.name[8:]}"] = int(path.read_text())
        for pid, command in living.items():
            for name, word in (
                ("guardian", "guardian.py"),
                ("fork server", '"modules"'),
                ("writer", "storage.process_main"),
            ):
                if word in command and pid not in found.values():
                    found[name] = pid
        return {name: pid for name, pid in found.items() if pid in living}

    def ports(self) -> dict[str, tuple[str, int]]:
        """All that listens, by process."""
        printed = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True).stdout
        names = {pid: name for name, pid in self.processes().items()}
        return {
            f"{names.get(int(pid), 'other')} :{port}": (host.strip("[]"), int(port))
            for host, port, pid in _LISTENS.findall(printed)
        }

    def files(self) -> dict[str, list[Path]]:
        """Files of backups, on disk and in memory."""
        return {
            "checkpoint": list((self.sandbox.work / "backup").rglob("*")),
            "memory": list(Path("/dev/shm").glob("stratagem-*/**/*")),
        }

    def steps(self) -> int:
        """Steps of all starts so far."""
        with contextlib.suppress(OSError):
            return (self.sandbox.notes / "steps").read_bytes().count(b"\n")
        return 0

    def hurry(self) -> None:
        """Ends the pauses between steps."""
        (self.sandbox.notes / "hurry").touch()

    def noticed_s(self) -> list[float]:
        """Times at which the launcher reported a failure or a signal."""
        return [at_s for at_s, line in list(self.started.lines) if _NOTICED.search(line)]

    def wait(self, timeout_s: float) -> Ended:
        """Waits for the launcher."""
        return Ended(self.started.wait(timeout_s), self.started.output)

    def verdict(self, ended: Ended, faults: Sequence[Fault]) -> Outcome:
        """Compares the weights; a launch that ended before is repeated, and has to resume."""
        if ended.code is None:
            return Outcome("hang", "the launch is over the limit")
        if ended.code == 0:
            return self._compared()
        if not any(fault.ends for fault in faults):
            return Outcome("wrong", f"exit code {ended.code}, although it may restart")
        causes = "|".join(fault.causes for fault in faults if fault.causes)
        is_named = any(_is_exit_by(ended.code, fault) for fault in faults)
        if not is_named and not re.search(causes or "(?!)", ended.output):
            return Outcome("unnamed", f"exit code {ended.code}: {ended.output[-_TAIL_CHARACTERS:]}")
        return self._resumed(f"exit code {ended.code}", faults)

    def _resumed(self, first: str, faults: Sequence[Fault]) -> Outcome:
        """Starts the job again, without faults."""
        self._wait_for_orphans()
        self.started = self._start()
        again = self.wait(_RESUME_LIMIT_S)
        if again.hang:
            return Outcome("hang", "the next launch is over the limit")
        if again.code == 0:
            compared = self._compared()
            is_good = compared.kind in ("identical", "promised")
            why = f"{first}; the next launch resumed, {compared.kind}"
            return Outcome("error", why) if is_good else compared
        damaged = [fault for fault in faults if fault.kind.startswith("checkpoint")]
        if damaged and re.search(damaged[0].causes, again.output):
            return Outcome("error", "the damaged backup was refused")
        return Outcome("wrong", f"the next launch ended too: {again.output[-_TAIL_CHARACTERS:]}")

    def _wait_for_orphans(self) -> None:
        """Gives the guardian the time that it needs to kill what a killed launcher left."""
        deadline_s = time.monotonic() + 10.0
        while self.sandbox.processes() and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def _compared(self) -> Outcome:
        ends = sorted(self.sandbox.notes.glob("end-*.npz"))
        if not ends:
            return Outcome("wrong", "exit code 0, and no weights")
        for path in ends:
            with np.load(path) as values:
                why = difference(values, self.reference, is_exact=self.is_exact)
            if why:
                return Outcome("wrong", f"{path.name}: {why}")
        return Outcome("identical" if self.is_exact else "promised")


def _is_exit_by(code: int, fault: Fault) -> bool:
    """True if an exit code says by which signal to the launcher it ended, as a shell shows it."""
    if not fault.ends or fault.kind not in ("SIGKILL", "SIGTERM", "SIGINT", "OOM kill"):
        return False
    signum = signal.SIGKILL if fault.kind == "OOM kill" else signal.Signals[fault.kind]
    return code in (-signum, 128 + signum)


def difference(values: Weights, reference: Weights, *, is_exact: bool) -> str:
    """How weights differ from those of an undisturbed run; empty if they do not."""
    if set(values) != set(reference):
        return f"{len(values)} values in place of {len(reference)}"
    for name in sorted(reference):
        one, other = np.asarray(values[name]), np.asarray(reference[name])
        same = np.array_equal(one, other)
        # Other roundings; an example lost or repeated changes far more.
        if not same and (is_exact or not np.allclose(one, other, rtol=1e-4, atol=1e-6)):
            largest = np.max(np.abs(one.astype("float64") - other)) if one.size else 0
            return f"{name} differs, by at most {largest}"
    return ""


def launch_command(
    sandbox: Sandbox, options: Sequence[str], backup: Mapping[str, Any]
) -> list[str]:
    """The command that launches `fit.py`."""
    program = [str(sandbox.tree / _PROGRAM), str(sandbox.notes), str(sandbox.work / "backup")]
    launch = [sys.executable, "-m", "stratagem", "launch", "--grace-s", "3", *options]
    return [*launch, *program, json.dumps(backup)]


def draw_backup(chance: Random) -> dict[str, Any]:
    """Draws how the job backs up."""
    return {
        "save_freq": chance.choice((5, 20)),
        "double_checkpoint": chance.random() < 0.5,
        "enable_async": chance.random() < 0.5,
        "saves_on_notice": chance.random() < 0.5,
    }


def draw_variables(chance: Random, programs: Path) -> dict[str, str]:
    """Draws the environment: mostly with programs that earlier trials compiled."""
    variables = {
        **LIMITS,
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
    }
    if chance.random() < 0.75:
        variables |= {
            "JAX_COMPILATION_CACHE_DIR": str(programs),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return variables


class Lockstep:
    """Two or three workers that restart together."""

    name = "lockstep"

    def start(self, sandbox: Sandbox, chance: Random) -> RunningFit:
        """Launches the job."""
        workers = chance.choice((2, 3))
        options = ["--workers", str(workers), "--max-restarts", str(_MAX_RESTARTS)]
        return start_fit(sandbox, chance, workers, options, is_exact=True)


def start_fit(
    sandbox: Sandbox, chance: Random, workers: int, options: Sequence[str], *, is_exact: bool
) -> RunningFit:
    """Launches `fit.py`, after an undisturbed run for comparison, once for all trials."""
    cache = sandbox.tree / "runs" / "chaos" / "cache"
    programs = cache / "programs"
    programs.mkdir(parents=True, exist_ok=True)
    dropout = 0.2 if is_exact else 0.0
    reference = cache / f"reference-{workers}-{dropout}.npz"
    if not reference.exists():
        _record_reference(sandbox, workers, dropout, reference)
    measured = sandbox.home / ".cache" / "stratagem"
    shutil.copytree(cache / "measured", measured, dirs_exist_ok=True)
    with np.load(reference) as values:
        weights = {name: values[name] for name in values.files}
    command = launch_command(sandbox, options, draw_backup(chance) | {"dropout": dropout})
    return RunningFit(sandbox, command, draw_variables(chance, programs), weights, is_exact)


def _record_reference(sandbox: Sandbox, workers: int, dropout: float, reference: Path) -> None:
    """Runs the job undisturbed, and keeps its weights."""
    backup = {"enable_async": False, "saves_on_notice": False, "dropout": dropout}
    command = launch_command(sandbox, ["--workers", str(workers)], backup)
    (sandbox.notes / "hurry").touch()
    variables = draw_variables(Random(0), reference.parent / "programs")
    for name in LIMITS:
        variables.pop(name)
    started = sandbox.start(command, variables)
    if started.wait(_RESUME_LIMIT_S) != 0:
        raise RuntimeError(f"The undisturbed run failed:\n{started.output}")
    measured = sandbox.home / ".cache" / "stratagem"
    shutil.copytree(measured, reference.parent / "measured", dirs_exist_ok=True)
    new = reference.with_name(f"{reference.stem}-{time.time_ns()}.npz")
    new.write_bytes((sandbox.notes / "end-0.npz").read_bytes())
    new.rename(reference)
    for path in [*sandbox.notes.glob("*-*"), sandbox.notes / "steps", sandbox.notes / "hurry"]:
        path.unlink(missing_ok=True)
    sandbox.kill_all()
