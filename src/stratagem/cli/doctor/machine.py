"""Limits of the machine: cores, memory, shared memory, open files, disks, and the clock."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

from stratagem import environment
from stratagem.cli.doctor.finding import Finding, Level
from stratagem.processor_time import available_cores

_TOPIC = "machine"
_BYTES_PER_GIB = 2**30
_LOW_SHM_BYTES = 2**30
_LOW_FILES = 4096
_FEW_FREE_FILES = 1000
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
        most_open_files: hard limit, up to which `ulimit` can raise it; -1 without one.
        free_bytes: free space by folder, one folder of each file system.
        free_files: how many files can be created there; folders without a limit are left out.
        time_s: Unix time.
    """

    num_cores: float
    num_machine_cores: int
    memory_bytes: int
    shm_bytes: int | None
    max_open_files: int
    free_bytes: Mapping[str, int]
    time_s: float
    most_open_files: int = -1
    free_files: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


def read_limits(cgroup: Path = Path("/sys/fs/cgroup")) -> Limits:
    """Reads the limits, with those of the container."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read(cgroup / "memory.max")
    if limit.isdecimal():
        memory_bytes = min(memory_bytes, int(limit))
    shm = Path("/dev/shm")  # noqa: S108 - only measured
    statuses = {folder: os.statvfs(folder) for folder in _folders()}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        num_cores=available_cores(cgroup),
        num_machine_cores=os.cpu_count() or 1,
        memory_bytes=memory_bytes,
        shm_bytes=shutil.disk_usage(shm).total if shm.exists() else None,
        max_open_files=soft,
        most_open_files=hard,
        free_bytes={name: one.f_bavail * one.f_frsize for name, one in statuses.items()},
        free_files={name: one.f_favail for name, one in statuses.items() if one.f_files},
        time_s=time.time(),
    )


def check_machine(limits: Limits) -> list[Finding]:
    """Reports the limits, and those that are too low."""
    findings = [
        Finding(
            _TOPIC,
            Level.OK,
            f"{limits.num_cores:g} of {limits.num_machine_cores} cores, "
            f"{_size(limits.memory_bytes)} of memory{_shown_limits(limits)}.",
        )
    ]
    if limits.shm_bytes is not None and limits.shm_bytes < _LOW_SHM_BYTES:
        findings.append(
            Finding(
                _TOPIC,
                Level.WARNING,
                f"/dev/shm has {_size(limits.shm_bytes)}; NCCL, Ray and input workers "  # noqa: S108
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
                _files_fix(limits.most_open_files),
            )
        )
    for folder, free_bytes in limits.free_bytes.items():
        findings += _check_disk(folder, free_bytes, limits.free_files.get(folder))
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


def _files_fix(most: int) -> str:
    if 0 <= most < _LOW_FILES:
        return (
            f"raise the hard limit, {most}: docker run --ulimit nofile=65536, LimitNOFILE=65536 in "
            "the systemd unit, or /etc/security/limits.conf."
        )
    count = 65536 if most < 0 else min(most, 65536)
    return f"ulimit -n {count}, or LimitNOFILE=65536 in the systemd unit."


def _shown_limits(limits: Limits) -> str:
    shared = "" if limits.shm_bytes is None else f", {_size(limits.shm_bytes)} of shared memory"
    files = "" if limits.max_open_files < 0 else f", {limits.max_open_files} open files"
    return shared + files


def _folders() -> list[str]:
    """Returns one folder of each file system that runs write to."""
    found: dict[int, str] = {}
    candidates = (
        os.getcwd(),
        environment.lookup("TMPDIR") or "/tmp",  # noqa: S108 - only measured
        str(Path.home()),
        environment.lookup("STRATAGEM_RUN_DIR"),
    )
    for folder in filter(None, candidates):
        if os.path.isdir(folder):
            found.setdefault(os.stat(folder).st_dev, folder)
    return list(found.values())


def _check_disk(folder: str, free_bytes: int, free_files: int | None) -> list[Finding]:
    if free_files is not None and free_files < _FEW_FREE_FILES:
        return [
            Finding(
                _TOPIC,
                Level.ERROR,
                f"{folder} has room for {free_files} more files (inodes), whatever their size.",
                "remove small files; df -i shows the limit, du --inodes where they are.",
            )
        ]
    if free_bytes >= _LOW_DISK_BYTES:
        return []
    level = Level.ERROR if free_bytes < _FULL_DISK_BYTES else Level.WARNING
    return [
        Finding(
            _TOPIC,
            level,
            f"The disk of {folder} has {_size(free_bytes)} free; checkpoints and caches need "
            "space.",
            f"remove files (du -xh {folder} | sort -h | tail), or write checkpoints and TMPDIR "
            "elsewhere.",
        )
    ]


def _size(num_bytes: int) -> str:
    for unit, unit_bytes in (("GiB", _BYTES_PER_GIB), ("MiB", 2**20)):
        if num_bytes >= unit_bytes:
            return f"{num_bytes / unit_bytes:.1f} {unit}"
    return f"{num_bytes / 2**10:.0f} KiB"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
