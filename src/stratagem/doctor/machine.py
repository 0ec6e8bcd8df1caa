"""Limits of the machine: cores, memory, shared memory, open files, disks, and the clock."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from stratagem.doctor.finding import Finding, Level

__all__ = ["Limits", "check_machine", "read_limits"]

_TOPIC = "machine"
_BYTES_PER_GIB = 2**30
_LOW_SHM_BYTES = 2**30
_LOW_FILES = 4096
_LOW_DISK_BYTES, _FULL_DISK_BYTES = 10 * _BYTES_PER_GIB, _BYTES_PER_GIB
# Certificates and schedulers fail before this release existed.
_EARLIEST_TIME_S = 1_767_225_600  # 2026-01-01


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of this process.

    Args:
        num_cores: cores that this process may use.
        num_machine_cores: cores of the machine.
        memory_bytes: memory that this process may use.
        shm_bytes: size of `/dev/shm`; None without one.
        max_open_files: soft limit of file descriptors.
        free_bytes: free space by folder.
        time_s: Unix time.
    """

    num_cores: float
    num_machine_cores: int
    memory_bytes: int
    shm_bytes: int | None
    max_open_files: int
    free_bytes: Mapping[str, int]
    time_s: float


def read_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Reads the limits, with those of the container."""
    cores = float(len(os.sched_getaffinity(0)))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        cores = min(cores, int(quota) / int(period))
    limit = _read(cgroup / "memory.max")
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    shm = Path("/dev/shm")
    folders = dict.fromkeys((os.getcwd(), tempfile.gettempdir(), str(Path.home())))
    return Limits(
        num_cores=cores,
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        shm_bytes=shutil.disk_usage(shm).total if shm.exists() else None,
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        free_bytes={name: shutil.disk_usage(name).free for name in folders if os.path.isdir(name)},
        time_s=time.time(),
    )


def check_machine(limits: Limits) -> list[Finding]:
    """Reports the limits, and those that are too low."""
    findings = [
        Finding(
            _TOPIC,
            Level.OK,
            f"{limits.num_cores:g} of {limits.num_machine_cores} cores, "
            f"{_gib(limits.memory_bytes)} of memory.",
        )
    ]
    if limits.shm_bytes is not None and limits.shm_bytes < _LOW_SHM_BYTES:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"/dev/shm has {limits.shm_bytes / 2**20:.0f} MiB; NCCL, Ray and input workers "
                "exchange data through it.",
                "docker run --shm-size=4g, or in Kubernetes an emptyDir with medium: Memory "
                "mounted at /dev/shm.",
            )
        )
    if 0 <= limits.max_open_files < _LOW_FILES:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"This process may open {limits.max_open_files} files; each connection is one.",
                "ulimit -n 65536, or LimitNOFILE=65536 in the systemd unit.",
            )
        )
    for folder, free_bytes in limits.free_bytes.items():
        findings += _check_disk(folder, free_bytes)
    if limits.time_s < _EARLIEST_TIME_S:
        findings.append(
            Finding(
                _TOPIC,
                Level.ERROR,
                f"The clock says {time.strftime('%Y-%m-%d', time.gmtime(limits.time_s))}.",
                "synchronize it, for example with chrony or systemd-timesyncd.",
            )
        )
    return findings


def _check_disk(folder: str, free_bytes: int) -> list[Finding]:
    if free_bytes >= _LOW_DISK_BYTES:
        return []
    level = Level.ERROR if free_bytes < _FULL_DISK_BYTES else Level.WARNING
    return [
        Finding(
            _TOPIC,
            level,
            f"{folder} has {_gib(free_bytes)} free; checkpoints and caches need space.",
            "free space, or write checkpoints and TMPDIR elsewhere.",
        )
    ]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _BYTES_PER_GIB:.1f} GiB"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
