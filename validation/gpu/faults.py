"""Processes that are killed while they use the GPU: its memory, the others, and the restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from validation.gpu.checks import check, device, is_on_cpu
from validation.gpu.processes import PROGRAMS, launched


def _memory_of(pid: int) -> tuple[int | None, int]:
    """Returns the MiB of a process on the GPU, if listed, and of all processes."""
    if is_on_cpu():
        return None, 0

    def asked(*arguments: str) -> str:
        return subprocess.run(
            ["nvidia-smi", *arguments, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout

    rows = [line.split(",") for line in asked("--query-compute-apps=pid,used_memory").splitlines()]
    own = [
        int(used) for number, used in rows if number.strip() == str(pid) and used.strip().isdigit()
    ]
    used = int(asked("--query-gpu=memory.used").split()[0])
    return (own[0] if own else None), used


@check(priority=1)
def killed_while_a_kernel_runs() -> dict[str, Any]:
    import stratagem as sg
    from validation.gpu.models import train

    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "computing.py")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "RUNNING\n", line
    figures: dict[str, Any] = {"MiB while it runs, own and all": _memory_of(process.pid)}
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    figures |= _freed(process)
    losses = train(sg.MirroredStrategy([device()]), "mlp").losses_of_fit
    figures["losses of another process"] = losses
    assert np.isfinite(losses).all()
    return figures


def _freed(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Waits until a killed process has ended and its memory of the GPU is free."""
    begin_s = time.monotonic()
    process.wait(60)
    figures: dict[str, Any] = {"ended after s": time.monotonic() - begin_s}
    while not is_on_cpu():
        own, _ = _memory_of(process.pid)
        if own is None or time.monotonic() - begin_s > 30:
            break
        time.sleep(0.2)
    figures["MiB afterwards, own and all"] = _memory_of(process.pid)
    figures["free after s"] = time.monotonic() - begin_s
    assert figures["MiB afterwards, own and all"][0] is None, figures
    return figures


@check(priority=1)
def kernel_that_does_not_end() -> dict[str, Any]:
    """A step that never ends: which signals end its process, its stacks, and the memory."""
    process = subprocess.Popen(
        [sys.executable, str(PROGRAMS / "endless.py")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line == "RUNNING\n", line
    time.sleep(3)
    assert process.poll() is None, process.stderr.read()
    figures: dict[str, Any] = {"MiB while it runs, own and all": _memory_of(process.pid)}
    process.send_signal(signal.SIGUSR1)  # prints the stacks of its threads
    for name in ("SIGINT", "SIGTERM", "SIGKILL"):
        process.send_signal(getattr(signal, name))
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            continue
        figures["ended by"] = name
        break
    figures |= _freed(process)
    errors = process.stderr.read()
    figures["stderr"] = errors[-6000:]
    assert "endless.py" in errors, figures
    return figures


@check(priority=0)
def killed_worker_resumes_on_the_gpu() -> dict[str, Any]:
    """Killed by SIGKILL, restarted by the launcher, resumed: as if uninterrupted."""
    figures: dict[str, Any] = {}
    weights = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in ("stays", "dies"):
            arguments = [str(PROGRAMS / "resuming.py"), str(Path(folder) / name), name]
            ended = launched("--max-restarts", "1", *arguments)
            assert ended["code"] == 0, ended
            assert len(ended["results"]) == 1, ended
            weights[name] = np.load(Path(folder) / f"{name}.npy")
            figures[name] = ended
        left = _processes_with(folder)
    assert "restart 1 of 1" in figures["dies"]["output"], figures
    figures["difference"] = float(np.abs(weights["stays"] - weights["dies"]).max())
    assert figures["difference"] <= 1e-5, figures
    assert not left, left
    return figures


def _processes_with(text: str) -> list[str]:
    """Returns the commands of the processes with a text in them, but this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in command and path.parent.name != str(os.getpid()):
            found.append(command)
    return found
