"""Limits that are too low, on made-up machines; and those of this one, against the system's own."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from stratagem.cli.doctor.examination import Limits, check_machine, read_limits
from stratagem.cli.doctor.settings import Level

_GOOD = Limits(
    num_cores=8,
    num_machine_cores=8,
    memory_bytes=2**36,
    shm_bytes=2**33,
    max_open_files=65536,
    free_bytes={"/data": 2**40},
    time_s=1_800_000_000,
)


def test_good_machine_has_no_problem() -> None:
    (finding,) = check_machine(_GOOD)
    assert finding.text == (
        "8 of 8 cores, 64.0 GiB of memory, 8.0 GiB of shared memory, 65536 open files."
    )


@pytest.mark.parametrize(
    ("changed", "level", "text", "fix"),
    [
        ({"max_open_files": 256, "most_open_files": 512}, Level.WARNING, "256", "limit, 512"),
        ({"max_open_files": 256, "most_open_files": 9000}, Level.WARNING, "256", "ulimit -n 9000"),
        ({"free_files": {"/data": 12}}, Level.ERROR, "room for 12 more files", "df -i"),
        ({"shm_bytes": 64 * 2**20}, Level.WARNING, "/dev/shm has 64.0 MiB", "--shm-size"),
        ({"max_open_files": 1024}, Level.WARNING, "may open 1024 files", "ulimit -n 65536"),
        (
            {"free_bytes": {"/data": 5 * 2**30}},
            Level.WARNING,
            "/data has 5.0 GiB free",
            "elsewhere",
        ),
        ({"free_bytes": {"/data": 2**20}}, Level.ERROR, "/data has 1.0 MiB free", "elsewhere"),
        ({"time_s": 0.0}, Level.ERROR, "The clock says 1970-01-01", "synchronize"),
    ],
    ids=[
        "low hard limit",
        "hard limit",
        "inodes",
        "small shm",
        "few files",
        "little disk",
        "full disk",
        "clock",
    ],
)
def test_low_limit_is_named_with_its_fix(
    changed: dict[str, object], level: Level, text: str, fix: str
) -> None:
    _, finding = check_machine(dataclasses.replace(_GOOD, **changed))
    assert finding.level is level
    assert text in finding.text
    assert fix in finding.fix


def test_no_shm_is_no_problem() -> None:
    assert len(check_machine(dataclasses.replace(_GOOD, shm_bytes=None))) == 1


def test_unlimited_files_are_no_problem() -> None:
    assert len(check_machine(dataclasses.replace(_GOOD, max_open_files=-1))) == 1


def test_limits_of_the_container_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2**28}\n")
    limits = read_limits(tmp_path)
    assert (limits.num_cores, limits.memory_bytes) == (0.5, 2**28)


def test_without_container_the_machine_counts(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    limits = read_limits(tmp_path)
    assert limits.num_cores == len(os.sched_getaffinity(0))
    assert limits.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = os.statvfs(os.getcwd())
    assert limits.free_bytes[os.getcwd()] == pytest.approx(
        status.f_bavail * status.f_frsize, rel=0.2
    )


def test_each_file_system_is_examined_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    monkeypatch.setenv("STRATAGEM_RUN_DIR", "/dev/shm")
    monkeypatch.chdir(tmp_path)
    free = read_limits().free_bytes
    assert len({os.stat(folder).st_dev for folder in free}) == len(free)
    assert str(tmp_path) in free
    assert str(tmp_path / "missing") not in free
    assert os.stat("/dev/shm").st_dev in {os.stat(folder).st_dev for folder in free}
