"""Input workers of a launch: one task more, which ends with the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stratagem as sg
from tests.remote.living import descendants, wait_for_end

_PROGRAM = Path(__file__).parent / "input_program.py"


@pytest.mark.slow
def test_processes_of_a_strategy_share_the_batches_of_one_job(capfd, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    before = descendants(os.getpid())
    sg.launch.run(_PROGRAM, workers=2, input_workers=2)
    out = capfd.readouterr().out.splitlines()
    lines = [line for line in out if "epoch" in line]
    # Steps have the rows of both processes, and each row comes once.
    assert sorted(lines) == sorted(
        f"[worker {worker}] epoch {epoch}: 10 steps, sum 1770"
        for worker in range(2)
        for epoch in range(2)
    )
    (started,) = (line for line in out if line.startswith("[input 0]"))
    assert started.endswith("has 2 workers.")
    assert not wait_for_end(descendants(os.getpid()) - before)
