"""Wall clocks that jump, as if somebody had set them. The monotonic clock goes on.

libfaketime is not used: Python 3.11 sleeps until a time of the monotonic clock, which libfaketime
0.9.10 refuses with EINVAL.
"""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene
from validation.chaos.sandbox import Sandbox

__all__ = ["KINDS", "variables"]

_SOURCE = Path(__file__).with_name("wall_clock.c")
_JUMPS_S = (3600, -3600, 400 * 86400, -400 * 86400, 30, -30)


def variables(sandbox: Sandbox) -> dict[str, str]:
    """Variables with which a job's clock can jump; none without a C compiler."""
    if shutil.which("cc") is None:
        return {}
    library = sandbox.notes / "wall_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, _SOURCE], check=True)
    _set(sandbox, 0)
    return {"LD_PRELOAD": str(library), "CHAOS_CLOCK_FILE": str(sandbox.notes / "clock")}


def _set(sandbox: Sandbox, seconds: int) -> None:
    new = sandbox.notes / "clock.new"
    new.write_text(f"{seconds}\n")
    new.rename(sandbox.notes / "clock")


def _jump(scene: Scene) -> Fault:
    if "LD_PRELOAD" not in scene.sandbox.variables:
        raise NotHereError("needs a C compiler, cc")
    jump_s = scene.chance.choice(_JUMPS_S)
    _set(scene.sandbox, jump_s)
    return Fault(
        kind="clock jump",
        where=f"{jump_s:+} s",
        lift=partial(_set, scene.sandbox, 0),
        lasts_s=scene.chance.choice((None, scene.chance.uniform(1.0, 8.0))),
    )


KINDS = (FaultKind("clock jump", _jump),)
