"""SIGKILL at an operation on a file: between the pieces of a save, a journal entry or a flush."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene
from validation.chaos.sandbox import PATIENCE, Sandbox

__all__ = ["KINDS", "variables"]

_SOURCE = Path(__file__).with_name("crash_points.c")
_WAIT_S = 8.0 * PATIENCE
_POLL_S = 0.005
# Words in paths; the files in which they are, as a job names them; and the largest number.
_PLACES = {
    "SIGKILL in a save": (".rows.new", "versions", 30),
    "SIGKILL at the end of a save": ("/saved/0", "versions", 40),
    "SIGKILL in a compaction": (".all.rows", "versions", 20),
    "SIGKILL in a publication": ("/LATEST", "versions", 4),
    "SIGKILL in a journal entry": (".journal", "entries", 40),
    "SIGKILL in a flush": ("/tiers/", "rows on disk", 30),
}


def variables(sandbox: Sandbox, others: Mapping[str, str]) -> dict[str, str]:
    """Variables with which a job's programs can be killed so; none without a C compiler."""
    if shutil.which("cc") is None:
        return {}
    library = sandbox.notes / "crash_points.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)
    preloaded = " ".join(filter(None, (others.get("LD_PRELOAD"), str(library))))
    return {"LD_PRELOAD": preloaded, "CHAOS_KILL_FILE": str(sandbox.notes / "kill")}


def _kill(name: str, scene: Scene) -> Fault:
    word, files, most = _PLACES[name]
    if "CHAOS_KILL_FILE" not in scene.sandbox.variables:
        raise NotHereError("needs a C compiler, cc")
    if not scene.job.files().get(files):
        raise NotHereError(f"the job has no {files}")
    control = scene.sandbox.notes / "kill"
    done = scene.sandbox.notes / "kill.done"
    done.unlink(missing_ok=True)
    new = scene.sandbox.notes / "kill.new"
    new.write_text(f"{word} {scene.chance.randint(1, most)} {time.monotonic_ns()}\n")
    names = {pid: role for role, pid in scene.job.processes().items()}
    new.rename(control)
    deadline_s = time.monotonic() + _WAIT_S
    while time.monotonic() < deadline_s:
        names |= {pid: role for role, pid in scene.job.processes().items()}
        if done.exists() and (text := done.read_text()):
            pid, operation, _ = text.split(" ", 2)
            role = names.get(int(pid), "another process")
            return Fault(kind=name, where=f"{operation} of {role}", causes="SIGKILL")
        time.sleep(_POLL_S)
    control.unlink(missing_ok=True)
    raise NotHereError(f"none came in {_WAIT_S:g} s")


KINDS = tuple(FaultKind(name, partial(_kill, name)) for name in _PLACES)
