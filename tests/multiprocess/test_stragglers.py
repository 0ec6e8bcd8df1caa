"""Workers that are slow in real processes: the report names them, and says why."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from stratagem.observe.monitoring.html_report import load_run
from stratagem.observe.stragglers.attribution import RunCost
from tests.multiprocess.cluster import PROGRAMS, run_cluster
from tests.multiprocess.namespaces import can_make_hosts, hosts

# What they find are times, which programs on the same cores change.
pytestmark = pytest.mark.slow

_PROGRAM = str(PROGRAMS / "stragglers.py")


def _cost(folder: Path, *arguments: str, count: int = 3, machines=None) -> RunCost:
    """Returns what slow workers have cost in a run of the program."""
    ended = run_cluster([_PROGRAM, *arguments], count, machines, STRATAGEM_RUN_DIR=str(folder))
    for one in ended:
        assert one.code == 0, one.errors
    cost = load_run(folder).series.cost
    assert cost is not None
    return cost


def _found(cost: RunCost) -> dict[str, str]:
    return {one.task: one.cause.value for one in cost.slow if one.cause is not None}


def test_elastic_workers_are_slow_in_input_and_in_computing(tmp_path: Path) -> None:
    cost = _cost(tmp_path, "elastic", "20", "16", "1:input:0:0.2", "2:compute:0:0.15", count=4)
    assert _found(cost) == {"worker 1": "input", "worker 2": "compute"}
    first, one, two, _ = cost.workers
    # Two wait 0.15 s for both, and three 0.05 s for worker 1: 0.1 and 0.05 s each, on average.
    assert one.late_s == pytest.approx(0.1, rel=0.3)
    assert two.late_s == pytest.approx(0.05, rel=0.5)
    assert (one.input_s or 0.0) > (first.input_s or 0.0) + 0.1
    assert two.work_s > first.work_s + 0.1
    assert (first.peers_s or 0.0) > (one.peers_s or 0.0) + 0.1


def test_no_worker_is_named_if_a_backup_worker_takes_its_place(tmp_path: Path) -> None:
    command = [_PROGRAM, "backed", "20", "16", "1:compute:0:0.3"]
    for one in run_cluster(command, 3, STRATAGEM_RUN_DIR=str(tmp_path)):
        assert one.code == 0, one.errors
    series = load_run(tmp_path).series
    assert series.leaves_out
    assert series.cost is None
    assert series.stragglers is None


@pytest.mark.parametrize("cause", ["input", "host"])
def test_mirrored_worker_is_slow(tmp_path: Path, cause: str) -> None:
    cost = _cost(tmp_path, "mirrored", "60", "16", f"1:{cause}:0:0.1")
    assert _found(cost) == {"worker 1": "input" if cause == "input" else "compute"}


@pytest.mark.parametrize("kind", ["elastic", "mirrored"])
def test_equal_workers_are_not_slow(tmp_path: Path, kind: str) -> None:
    """All sleep in their input, so that a busy machine does not make one of them slow."""
    slow = [f"{worker}:input:0:0.1" for worker in range(3)]
    assert _found(_cost(tmp_path, kind, "60", "16", *slow)) == {}


def test_elastic_worker_has_a_slow_link(tmp_path: Path) -> None:
    if not can_make_hosts():
        pytest.skip("needs the right to make network namespaces")
    with hosts(3) as machines:
        bucket = ["rate", "20mbit", "burst", "64kb", "limit", "1mb"]
        command = ["tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *bucket]
        subprocess.run([*machines[2][0], *command], check=True, capture_output=True)
        cost = _cost(tmp_path, "elastic", "30", "20000", machines=machines)
    assert _found(cost) == {"worker 2": "link"}
