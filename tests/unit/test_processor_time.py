"""Processor time of a process tree, and the cores that it may use."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stratagem.resources import available_cores, process_tree_s

_BURNS = """
import subprocess, sys, time

deep = int(sys.argv[1])
inner = subprocess.Popen([sys.executable, *sys.orig_argv[1:3], str(deep - 1)]) if deep else None
while time.process_time() < 0.5:
    pass
print("burnt", flush=True)
sys.stdin.read() if inner is None else inner.wait()
"""


def test_descendants_count_while_they_run_and_after_they_ended() -> None:
    before_s = process_tree_s()
    program = subprocess.Popen(
        [sys.executable, "-c", _BURNS, "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert program.stdin is not None
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(2)] == [b"burnt\n"] * 2
    running_s = process_tree_s() - before_s
    program.communicate()
    ended_s = process_tree_s() - before_s
    assert 0.95 <= running_s <= ended_s < running_s + 0.5


def test_threads_of_this_process_count() -> None:
    before_s, end_s = process_tree_s(), time.thread_time() + 0.2
    while time.thread_time() < end_s:
        pass
    assert process_tree_s() - before_s >= 0.15


@pytest.mark.parametrize(
    ("quota", "cores"), [("50000 100000", 0.5), ("max 100000", None), ("x", None), (None, None)]
)
def test_container_limits_the_cores(tmp_path: Path, quota: str | None, cores: float | None) -> None:
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n", encoding="utf-8")
    assert available_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))
