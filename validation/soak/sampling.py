"""Memory, descriptors, threads and files of running processes, read from /proc over time."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

__all__ = ["Sample", "Sampler", "processes_below", "read_samples"]

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources of one process, or files of one folder, at `time_s` after the start.

    `role` is a process's role with its pid, such as "server 0"; a process that was restarted has
    the same role and another `pid`. `pid` is 0 for a folder, whose `num_files` alone is set.
    """

    time_s: float
    role: str
    pid: int = 0
    memory_bytes: int = 0
    num_descriptors: int = 0
    num_threads: int = 0
    num_files: int = 0


def processes_below(pid: int) -> dict[int, tuple[int, str]]:
    """Returns the parents and command lines of all descendants of a process, by pid."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    below: dict[int, tuple[int, str]] = {}
    for one in parents:
        ancestor = one
        while ancestor in parents and ancestor != pid:
            ancestor = parents[ancestor]
        if ancestor == pid and one != pid:
            try:
                words = Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            below[one] = parents[one], b" ".join(words).decode(errors="replace").strip()
    return below


class Sampler:
    """Appends samples to a file of JSON lines."""

    def __init__(self, path: Path, folders: Iterable[Path]) -> None:
        self._file = path.open("a", buffering=1)
        self._folders = tuple(folders)
        self._start_s = time.monotonic()

    @property
    def time_s(self) -> float:
        return time.monotonic() - self._start_s

    def sample(self, pids: Mapping[str, int]) -> None:
        """Samples processes, by role, and the folders."""
        for role, pid in pids.items():
            if found := self._process(role, pid):
                self._write(found)
        for folder in self._folders:
            count = sum(len(files) for _, _, files in os.walk(folder))
            self._write(Sample(time_s=self.time_s, role=str(folder), num_files=count))

    def close(self) -> None:
        self._file.close()

    def _process(self, role: str, pid: int) -> Sample | None:
        folder = Path(f"/proc/{pid}")
        try:
            return Sample(
                time_s=self.time_s,
                role=role,
                pid=pid,
                memory_bytes=int((folder / "statm").read_text().split()[1]) * _PAGE_BYTES,
                num_descriptors=len(os.listdir(folder / "fd")),
                num_threads=len(os.listdir(folder / "task")),
            )
        except OSError:  # it has ended
            return None

    def _write(self, sample: Sample) -> None:
        self._file.write(json.dumps(dataclasses.asdict(sample)) + "\n")


def read_samples(path: Path) -> list[Sample]:
    """Returns the samples of a file, the earliest first."""
    return [Sample(**json.loads(line)) for line in path.read_text().splitlines()]
