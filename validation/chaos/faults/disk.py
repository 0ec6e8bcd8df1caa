"""Disks that are full, slow or read-only, and damaged files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
import time
from functools import partial
from pathlib import Path

from validation.chaos.faults.kinds import Fault, FaultKind, NotHereError, Scene

__all__ = ["KINDS"]

_LASTS_S = (1.0, 8.0)
_PIECE = bytes(2**16)
# The kernel refuses it while a file is open for writing.
_REMOUNT_TRIES = 100
_PAUSE_S = 0.02


def _lasts_s(scene: Scene) -> float | None:
    return None if scene.chance.random() < 0.3 else scene.chance.uniform(*_LASTS_S)


def _full(scene: Scene) -> Fault:
    work = scene.sandbox.work
    filler = work / "filler"
    try:
        filler.touch()
    except OSError as error:
        raise NotHereError("it is read-only") from error
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(_PIECE)
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(b"0")
    lasts_s = _lasts_s(scene)
    return Fault(
        kind="disk full",
        where="the job's folder",
        ends=True,
        causes="No space left|ENOSPC|disk is full",
        lift=partial(_remove, filler),
        lasts_s=lasts_s,
    )


def _remove(filler: Path) -> None:
    """Removes the filler; ends another fault that has made the file system read-only meanwhile."""
    try:
        filler.unlink(missing_ok=True)
    except OSError:
        _make_writable(filler.parent)
        filler.unlink(missing_ok=True)


def _read_only(scene: Scene) -> Fault:
    work = str(scene.sandbox.work)
    for _ in range(_REMOUNT_TRIES):
        if subprocess.run(["mount", "-o", "remount,ro", work], capture_output=True).returncode == 0:
            break
        time.sleep(_PAUSE_S)
    else:
        raise NotHereError("a file stayed open for writing, so the file system did")
    return Fault(
        kind="disk read-only",
        where="the job's folder",
        ends=True,
        causes="Read-only file system|EROFS",
        lift=partial(_make_writable, work),
        lasts_s=_lasts_s(scene),
    )


def _make_writable(work: str | Path) -> None:
    """Ends "disk read-only"; also "disk slow", because the kernel refuses it meanwhile."""
    subprocess.run(["fsfreeze", "--unfreeze", work], check=False, capture_output=True)
    subprocess.run(["mount", "-o", "remount,rw", work], check=True)


def _slow(scene: Scene) -> Fault:
    """Freezes the file system: whoever writes waits, as for a disk that does not answer."""
    if not scene.sandbox.is_disk:
        raise NotHereError("needs a loop device with ext4")
    work = str(scene.sandbox.work)
    if subprocess.run(["fsfreeze", "--freeze", work], capture_output=True).returncode:
        raise NotHereError("it is frozen already, or read-only")
    lasts_s = scene.chance.uniform(*_LASTS_S)
    unfreeze = partial(
        subprocess.run, ["fsfreeze", "--unfreeze", work], check=False, capture_output=True
    )
    # In a thread of its own: lifting another fault may wait for this file system.
    timer = threading.Timer(lasts_s, unfreeze)
    timer.daemon = True
    timer.start()
    return Fault(
        kind="disk slow",
        where="the job's folder",
        ends=True,
        causes="has not answered|no progress|did not|waited|SAVE_TIMEOUT|SIGKILL",
        lift=unfreeze,
        lasts_s=lasts_s,
    )


def _damaged(kind: str, is_cut: bool, scene: Scene) -> Fault:
    files = [path for path in scene.job.files().get(kind, []) if path.is_file()]
    sizes = {path: path.stat().st_size for path in files}
    files = sorted(path for path, size in sizes.items() if size)
    if not files:
        raise NotHereError(f"the job has no {kind} yet")
    path = scene.chance.choice(files)
    try:
        _damage(path, is_cut, scene.chance.random(), 1 << scene.chance.randrange(8))
    except OSError as error:
        raise NotHereError(f"the file is gone: {error}") from error
    return Fault(
        kind=f"{kind} {'truncated' if is_cut else 'bit flipped'}",
        where=str(path.relative_to("/")),
        ends=True,
        causes="damaged|checksum|corrupt|truncated|cannot be read|unreadable",
    )


def _damage(path: Path, is_cut: bool, fraction: float, bit: int) -> None:
    size = path.stat().st_size
    place = int(fraction * size)
    if is_cut:
        os.truncate(path, place)
        return
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ bit]))


KINDS = (
    FaultKind("disk full", _full),
    FaultKind("disk read-only", _read_only),
    FaultKind("disk slow", _slow),
    *(
        FaultKind(f"{kind} {words}", partial(_damaged, kind, is_cut))
        for kind in ("checkpoint", "memory", "journal")
        for words, is_cut in (("truncated", True), ("bit flipped", False))
    ),
)
