"""Processor time of this process and those that it started, and the cores that they may use."""

from __future__ import annotations

import os
from pathlib import Path

# Fields after the name in /proc/PID/stat, from Linux's proc_pid_stat(5).
_PARENT, _FIRST_TIME, _END_OF_TIMES = 1, 11, 15
_CGROUP = Path("/sys/fs/cgroup")


def available_cores(cgroup: Path = _CGROUP) -> float:
    """Returns the cores that this process may use; a container may allow a part of one."""
    if hasattr(os, "sched_getaffinity"):
        cores = float(len(os.sched_getaffinity(0)))
    else:
        cores = float(os.cpu_count() or 1)
    try:
        quota, _, period = (cgroup / "cpu.max").read_text(encoding="utf-8").strip().partition(" ")
    except OSError:
        return cores
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) / int(period))
    return cores


def process_tree_s() -> float:
    """Returns the processor time of this process, its descendants, and those that have ended.

    Without Linux's `/proc`, processes that still run are left out.
    """
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    processes = {
        int(path.name): fields
        for path in Path("/proc").glob("[0-9]*")
        if (fields := _fields(path / "stat"))
    }
    children: dict[int, list[int]] = {}
    for pid, fields in processes.items():
        children.setdefault(int(fields[_PARENT]), []).append(pid)
    waiting, ticks = children.get(os.getpid(), []), 0
    while waiting:
        pid = waiting.pop()
        ticks += sum(map(int, processes[pid][_FIRST_TIME:_END_OF_TIMES]))
        waiting += children.get(pid, [])
    return own_s + ticks / os.sysconf("SC_CLK_TCK") if ticks else own_s


def _fields(stat: Path) -> list[str]:
    try:
        text = stat.read_text(encoding="utf-8", errors="replace")
    except OSError:  # it has ended
        return []
    return text.rpartition(")")[2].split()
