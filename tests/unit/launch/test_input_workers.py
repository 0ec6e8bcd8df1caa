"""Input workers of a launch: one task more, which ends with the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import stratagem as sg
from tests.unit.launch.remote.living import descendants, wait_for_end

_PROGRAM = Path(__file__).parent / "input_program.py"


@pytest.mark.slow
def test_processes_of_a_strategy_share_the_batches_of_one_job(capfd, monkeypatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    before = descendants(os.getpid())
    sg.launch.run(_PROGRAM, workers=2, input_workers=2)
    out = capfd.readouterr().out.splitlines()
    lines = [line for line in out if "epoch" in line]
    # Steps have the rows of both processes, and each row comes once.
    steps = {line.removeprefix("[worker 0] ") for line in lines if "worker 0" in line}
    assert len(lines) == 2 * len(steps) == 4
    assert steps == {line.removeprefix("[worker 1] ") for line in lines if "worker 1" in line}
    assert all(step.endswith("steps, sum 319600") for step in steps)
    (started,) = (line for line in out if line.startswith("[input 0]"))
    assert started.endswith("has 2 workers.")
    assert not wait_for_end(descendants(os.getpid()) - before)
