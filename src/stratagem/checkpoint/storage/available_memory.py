"""Memory that this process can still allocate."""

from __future__ import annotations

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
# A third stays free for what else is allocated meanwhile, here and in other processes.
_RESERVE = 1.5


def fits_in_memory(size_bytes: int) -> bool:
    """True if so much memory can be allocated, with a reserve; also outside Linux."""
    available_bytes = available_memory_bytes()
    return available_bytes is None or size_bytes * _RESERVE <= available_bytes


def available_memory_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Returns the memory of the machine, or of its container if less, without swap.

    The page cache counts as available. None where the kernel does not tell.
    """
    fields = _fields(meminfo)
    if "MemAvailable:" not in fields:
        return None
    available_bytes = fields["MemAvailable:"] * 1024
    try:
        limit_bytes = int((cgroup / "memory.max").read_text(encoding="utf-8"))
        used_bytes = int((cgroup / "memory.current").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no container, or one without a limit
        return available_bytes
    cached_bytes = _fields(cgroup / "memory.stat").get("inactive_file", 0)
    return min(available_bytes, max(limit_bytes - used_bytes + cached_bytes, 0))


def _fields(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {name: int(value) for name, value, *_ in (line.split() for line in lines)}
