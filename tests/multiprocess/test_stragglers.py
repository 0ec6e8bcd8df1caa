"""Workers that are slow in real processes: the report names them, and says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from stratagem.observe.events import read_run
from stratagem.observe.goodput import account_for
from stratagem.observe.stragglers import WorkerSummary, summaries_of
from tests.multiprocess.cluster import PROGRAMS, run_cluster

# What they find are times, which programs on the same cores change.
pytestmark = pytest.mark.slow

_PROGRAM = str(PROGRAMS / "stragglers.py")


def _workers(folder: Path, *arguments: str, count: int = 3) -> tuple[WorkerSummary, ...]:
    """Returns the times of the workers in a run of the program."""
    ended = run_cluster([_PROGRAM, *arguments], count, STRATAGEM_RUN_DIR=str(folder))
    for one in ended:
        assert one.code == 0, one.errors
    run = read_run(folder)
    return summaries_of(run.processes, account_for(run).whole_s)


def _found(workers: tuple[WorkerSummary, ...]) -> dict[str, str]:
    return {one.task: one.slow.cause.value for one in workers if one.slow is not None}


def test_elastic_workers_are_slow_in_input_and_in_computing(tmp_path: Path) -> None:
    workers = _workers(
        tmp_path, "elastic", "20", "16", "1:input:0:0.2", "2:compute:0:0.15", count=4
    )
    assert _found(workers) == {"worker 1": "input", "worker 2": "compute"}
    first, one, two, _ = workers
    assert one.slow is not None
    assert two.slow is not None
    assert one.slow.late_s == pytest.approx(0.2, rel=0.3)
    assert two.slow.late_s == pytest.approx(0.15, rel=0.3)
    assert (one.times.input_s or 0.0) > (first.times.input_s or 0.0) + 0.1
    assert two.times.busy_s > first.times.busy_s + 0.1
    assert (first.times.peers_s or 0.0) > (one.times.peers_s or 0.0) + 0.1


@pytest.mark.parametrize("cause", ["input", "host"])
def test_mirrored_worker_is_slow(tmp_path: Path, cause: str) -> None:
    workers = _workers(tmp_path, "mirrored", "60", "16", f"1:{cause}:0:0.1")
    assert _found(workers) == {"worker 1": "input" if cause == "input" else "compute"}


@pytest.mark.parametrize("kind", ["elastic", "mirrored"])
def test_equal_workers_are_not_slow(tmp_path: Path, kind: str) -> None:
    """All sleep in their input, so that a busy machine does not make one of them slow."""
    slow = [f"{worker}:input:0:0.1" for worker in range(3)]
    assert _found(_workers(tmp_path, kind, "60", "16", *slow)) == {}
