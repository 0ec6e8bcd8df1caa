"""Processes that the kernel kills because memory runs out."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene
from validation.chaos.faults.processes import choose

__all__ = ["KINDS"]

_MORE_BYTES = 2**20
_HOG_BYTES = 48 * 2**20
_LIMIT_S = 10.0
# Never killed itself: it needs the memory for which the kernel kills another process.
_HOG = f"""
open("/proc/self/oom_score_adj", "w").write("-1000")
open({{procs!r}}, "w").write("0")
bytearray({_HOG_BYTES})
"""


def _out_of_memory(scene: Scene) -> Fault:
    """Lowers the limit of the job's control group to its usage, with one process to be killed."""
    group = scene.sandbox.memory_group
    if group is None:
        raise NotHereError("needs a control group for memory, version 1")
    name, pid = choose(scene)
    heads = {other: one for other, one in scene.job.processes().items() if other == "launcher"}
    victim = Path(f"/proc/{pid}/oom_score_adj")
    usage, limit = (group / f"memory.{end}" for end in ("usage_in_bytes", "limit_in_bytes"))
    with contextlib.suppress(OSError):
        victim.write_text("1000")
    try:
        limit.write_text(str(int(usage.read_text()) + _MORE_BYTES))
        hog = _HOG.format(procs=str(group / "cgroup.procs"))
        subprocess.run(
            [sys.executable, "-S", "-I", "-c", hog], timeout=_LIMIT_S, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotHereError(f"the kernel did not do it: {error}") from error
    finally:
        limit.write_text("-1")
    # A victim that has just begun is small, so the kernel kills another process as well.
    name = next((other for other, one in heads.items() if _has_ended(one)), name)
    return Fault(kind="OOM kill", where=name, ends=name == "launcher", causes="SIGKILL")


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


KINDS = (FaultKind("OOM kill", _out_of_memory),)
