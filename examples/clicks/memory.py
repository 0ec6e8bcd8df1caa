"""A limit of the memory of every process of a run, set by the kernel, and what each has used.

The limit is that of `ulimit -d`: whatever a process may write to and shares with no other. What
would go beyond it is not handed out. A process inherits it from the one that starts it, so one that
is set before the servers and workers are started is theirs, too, and that of Ray.
"""

import dataclasses
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

# XLA starts several pools of one thread a core, and the stack of a thread counts as memory.
_NUM_THREADS = 4

# Each page is written to: the kernel hands out nothing that is only asked for.
_MAKE = "import sys, numpy; numpy.ones((int(sys.argv[1]), int(sys.argv[2])), numpy.float32)"
_MAKE_LIMIT_S = 120


@dataclasses.dataclass(frozen=True)
class Used:
    """What one process has used.

    Args:
        process: what it is.
        peak_bytes: its largest resident memory so far.
        limit_bytes: its limit; None for none.
    """

    process: str
    peak_bytes: int
    limit_bytes: int | None


def limit_memory(limit_bytes):
    """Limits the memory and threads of this process and its future subprocesses, permanently.

    Args:
        limit_bytes: of each.
    """
    os.environ["NPROC"] = str(_NUM_THREADS)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))


def used_by(process, pid=None):
    """Returns what a process of this machine has used.

    Args:
        process: what it is.
        pid: its id; None for this process.
    """
    folder = Path("/proc", str(pid or os.getpid()))
    (peak_kib,) = re.findall(r"VmHWM:\s*(\d+) kB", (folder / "status").read_text())
    (limit,) = re.findall(r"Max data size\s+(\S+)", (folder / "limits").read_text())
    return Used(process, 1024 * int(peak_kib), None if limit == "unlimited" else int(limit))


def used_by_all(strategy):
    """Returns what the coordinator, which is this process, the servers and the workers have used.

    Args:
        strategy: whose servers and workers are processes of this machine.
    """
    workers = strategy.executor.coordinator.workers
    groups = {"server": strategy.cluster.servers.pids, "worker": workers.pids}
    return [
        used_by("coordinator"),
        *(
            used_by(f"{kind} {index}", pid)
            for kind, pids in groups.items()
            for index, pid in enumerate(pids)
        ),
    ]


def can_make(num_rows, width):
    """Tries to make a table of float32 in a process of its own, under the limit of this one.

    Args:
        num_rows: of the table.
        width: its columns.

    Returns:
        Whether there was room for it.

    Raises:
        RuntimeError: the process has ended in another way.
    """
    finished = subprocess.run(
        [sys.executable, "-c", _MAKE, str(num_rows), str(width)],
        capture_output=True,
        text=True,
        timeout=_MAKE_LIMIT_S,
        check=False,
    )
    if finished.returncode == 0:
        return True
    if "MemoryError" not in finished.stderr:
        raise RuntimeError(f"The process that was to make the table ended so:\n{finished.stderr}")
    return False
