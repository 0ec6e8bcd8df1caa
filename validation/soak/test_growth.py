"""A leak of a soak is found, and noise is not taken for one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from validation.soak.growth import growths
from validation.soak.sampling import Sample, Sampler, processes_below, read_samples


def _samples(values: np.ndarray, resource: str, pids: np.ndarray | int = 1) -> list[Sample]:
    numbers = np.broadcast_to(pids, values.shape)
    return [
        Sample(time_s=float(index), role="server 0", pid=int(pid), **{resource: int(value)})
        for index, (value, pid) in enumerate(zip(values, numbers, strict=True))
    ]


@pytest.mark.parametrize(
    ("resource", "level", "step"),
    [("memory_bytes", 200e6, 1e5), ("num_descriptors", 50, 0.05), ("num_threads", 20, 0.03)],
)
def test_slow_leak_is_found(resource: str, level: float, step: float) -> None:
    noise = np.random.default_rng(0)
    flat = level + noise.normal(0, level * 0.02, 600)
    (found,) = growths(_samples(flat, resource))
    assert found.is_flat
    (found,) = growths(_samples(flat + step * np.arange(600), resource))
    assert not found.is_flat


def test_leak_over_restarts_is_found() -> None:
    """Each process starts small; each successor ends larger than the one before."""
    pids = np.repeat(np.arange(40), 10)
    within = np.tile(np.linspace(100e6, 300e6, 10), 40)
    (found,) = growths(_samples(within, "memory_bytes", pids))
    assert found.is_flat
    (found,) = growths(_samples(within + 2e6 * pids, "memory_bytes", pids))
    assert not found.is_flat


def test_samples_are_those_of_the_process(tmp_path: Path) -> None:
    program = "import sys; held = [open('/dev/null') for _ in range(20)]; print(); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sampler = Sampler(tmp_path / "samples.jsonl", [tmp_path])
        sampler.sample({"it": process.pid, "gone": 2**22 + 1})
        sampler.close()
        assert process.pid in processes_below(os.getpid())
        process.communicate(b"")
    first, folder = read_samples(tmp_path / "samples.jsonl")
    assert (first.role, first.pid) == ("it", process.pid)
    assert 23 <= first.num_descriptors <= 30
    assert first.num_threads == 1
    assert first.memory_bytes > 2**20
    assert (folder.pid, folder.num_files) == (0, 1)
