"""Memory that a process can still allocate, on a machine and in a container."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.checkpoint.storage.process import available_memory_bytes, fits_in_memory

MEMINFO = "MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1000 kB\nHugePages_Total: 0\n"


def machine(folder: Path, **files: str) -> tuple[Path, Path]:
    meminfo = folder / "meminfo"
    meminfo.write_text(MEMINFO)
    for name, text in files.items():
        (folder / f"memory.{name}").write_text(text)
    return meminfo, folder


def test_the_page_cache_of_the_machine_is_available(tmp_path: Path) -> None:
    assert available_memory_bytes(*machine(tmp_path)) == 1000 * 1024


@pytest.mark.parametrize(
    ("limit", "expected"),
    [("500000\n", 500_000 - 300_000 + 50_000), ("100000\n", 0), ("9000000000\n", 1_024_000)],
)
def test_a_container_has_what_its_limit_leaves(tmp_path: Path, limit: str, expected: int) -> None:
    files = {"max": limit, "current": "300000\n", "stat": "anon 1\ninactive_file 50000\n"}
    assert available_memory_bytes(*machine(tmp_path, **files)) == expected


def test_a_container_without_a_limit_has_the_memory_of_the_machine(tmp_path: Path) -> None:
    files = {"max": "max\n", "current": "300000\n"}
    assert available_memory_bytes(*machine(tmp_path, **files)) == 1000 * 1024


def test_nothing_is_known_without_the_files_of_linux(tmp_path: Path) -> None:
    assert available_memory_bytes(tmp_path / "none", tmp_path) is None


def test_a_third_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stratagem.checkpoint.storage.process.available_memory_bytes", lambda: 900)
    assert fits_in_memory(600)
    assert not fits_in_memory(601)


def test_this_machine_has_room_for_a_byte_and_not_for_an_exabyte() -> None:
    assert fits_in_memory(1)
    if available_memory_bytes() is not None:
        assert not fits_in_memory(10**18)
