"""Sandboxes of trials: namespaces, file systems and processes of their own, and leftovers."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

__all__ = ["PATIENCE", "Sandbox", "Started", "enter", "entering", "why_impossible"]

# A factor for all limits, which a busy machine needs.
PATIENCE = float(os.environ.get("CHAOS_PATIENCE", "1"))
_BASE = Path("/media")
_TREE = _BASE / "tree"
_MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
_NEEDED = ("unshare", "ip", "mount", "iptables")
_REMOVE_LIMIT_S = 5.0
_DISK_BYTES = 48 * 2**20
# What other libraries keep, and our cache of compiled programs.
_KEPT = re.compile(r"/\.keras/|/\.(cache|config)/matplotlib|/\.cache/stratagem/programs/")
# The rest of the machine, in which a trial may find processes and files of nobody else.
_SETUP = f"""set -e
mount -t tmpfs -o size=4G chaos {_BASE}
mkdir {_TREE} {_BASE}/notes {_BASE}/home {_BASE}/work
mount --bind "$0" {_TREE}
mount -t tmpfs -o size=1G,mode=1777 chaos /tmp
mount -t tmpfs -o size=4G,mode=1777 chaos /dev/shm
ip link set lo up
cd {_TREE}
exec "$@"
"""


def why_impossible() -> str:
    """The reason why this machine cannot make sandboxes; empty if it can."""
    if os.geteuid() != 0:
        return "needs root, to make namespaces"
    lacking = [name for name in _NEEDED if shutil.which(name) is None]
    return f"needs {', '.join(lacking)} (Debian: util-linux, iproute2, iptables)" * bool(lacking)


def entering(root: Path, module: str, *arguments: str) -> list[str]:
    """The command that runs a module of the tree in namespaces of its own."""
    python = Path(sys.executable)
    inside = str(_TREE / python.relative_to(root) if python.is_relative_to(root) else python)
    flags = ("mount", "pid", "net", "ipc", "fork", "kill-child", "mount-proc")
    unshare = ["unshare", *(f"--{flag}" for flag in flags)]
    module_arguments = [inside, "-m", module, *arguments]
    return [*unshare, "sh", "-c", _SETUP, str(root), *module_arguments]


def enter() -> Sandbox:
    """Finishes the sandbox of this process; returns in a child of the namespace's init process."""
    child = os.fork()
    if child:
        _serve_as_init(child)
    disk = _BASE / "disk.img"
    work = _BASE / "work"
    with disk.open("wb") as file:
        file.truncate(_DISK_BYTES)
    is_disk = all(
        subprocess.run(command, capture_output=True).returncode == 0
        for command in (
            ["mkfs.ext4", "-q", "-m", "0", "-O", "^has_journal", str(disk)],
            ["mount", "-o", "loop", str(disk), str(work)],
        )
    )
    if not is_disk:
        size = f"size={_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "chaos", str(work)], check=True)
    return Sandbox(
        memory_group=_make_memory_group(),
        tree=_TREE,
        work=work,
        notes=_BASE / "notes",
        home=_BASE / "home",
        is_disk=is_disk,
    )


def _make_memory_group() -> Path | None:
    """Makes a control group for the job's memory; None without version 1 of control groups."""
    namespace = os.stat("/proc/self/ns/pid").st_ino
    group = _MEMORY_GROUPS / f"chaos-{namespace}"
    with contextlib.suppress(OSError):
        group.mkdir(exist_ok=True)
        return group
    return None


def _serve_as_init(child: int) -> None:
    """Waits for all processes whose parents are gone, and exits like the child."""
    while True:
        pid, status = os.wait()
        if pid == child:
            os._exit(max(0, os.waitstatus_to_exitcode(status)))


@dataclasses.dataclass
class Started:
    """A started program, and its output so far with the time of each line."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    @property
    def output(self) -> str:
        """All lines so far, of both streams."""
        return "\n".join(line for _, line in list(self.lines))

    def wait(self, timeout_s: float) -> int | None:
        """Exit code, negative for a signal; None if it still runs after the time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self.process.wait(timeout_s)
            self._reader.join(1.0)  # a process that is left may keep the pipe open
            return code
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sandbox:
    """Folders and processes of one trial.

    `work` is a small file system that faults may fill, freeze or damage; `notes` is for the job's
    progress and results, and no fault touches it. `is_disk` is False where `work` is in memory.
    """

    tree: Path
    work: Path
    notes: Path
    home: Path
    is_disk: bool
    memory_group: Path | None = None
    more_variables: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the job's programs."""
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        return {
            **kept,
            "HOME": str(self.home),
            "PYTHONPATH": f"{self.tree}/src:{self.tree}",
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "NPROC": "4",
            **self.more_variables,
        }

    def start(self, command: Sequence[str], variables: Mapping[str, str] | None = None) -> Started:
        """Starts a program in the job's folder, in a session of its own."""
        if self.memory_group is not None:
            enter_group = f'echo 0 > {self.memory_group}/cgroup.procs; exec "$@"'
            command = ["sh", "-c", enter_group, "sh", *command]
        return Started(
            subprocess.Popen(
                command,
                cwd=self.work,
                env={**self.variables, **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        )

    def processes(self) -> dict[int, str]:
        """Living processes of the job, with their command lines."""
        found: dict[int, str] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
                words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if state not in ("Z", "X") and words[0]:  # kernel threads have no words
                    found[int(folder.name)] = shlex.join(words[:-1])
        for own in (1, os.getpid()):
            found.pop(own, None)
        return found

    def leftovers(self) -> list[str]:
        """Processes, and files in memory, temporary and cache folders."""
        found = [f"process {line}" for line in self.processes().values()]
        for folder in (Path("/dev/shm"), Path("/tmp"), self.home):
            found += [str(path) for path in _topmost(folder)]
        return [one for one in found if not _KEPT.search(one)]

    def stacks(self) -> str:
        """Python stacks of all processes, if py-spy is there; for a job that hangs."""
        spy = Path(sys.executable).with_name("py-spy")
        if not spy.exists():
            return ""
        dumps = (
            subprocess.run([spy, "dump", "--pid", str(pid)], capture_output=True, text=True).stdout
            for pid in self.processes()
        )
        return "\n".join(dumps)

    def kill_all(self) -> None:
        """Kills all processes of the job."""
        while living := self.processes():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def remove(self) -> None:
        """Removes what outlives the namespaces, once all processes have ended."""
        deadline_s = time.monotonic() + _REMOVE_LIMIT_S
        while self.memory_group is not None and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):  # a process that was killed is still ending
                self.memory_group.rmdir()
                return
            time.sleep(0.02)


def _topmost(folder: Path) -> Iterator[Path]:
    """The files below a folder, and its empty folders."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink() and any(path.iterdir()):
            yield from _topmost(path)
        else:
            yield path
