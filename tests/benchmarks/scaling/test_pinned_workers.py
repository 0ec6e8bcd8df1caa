"""Workers on cores of their own: where they run, how they find each other, what they compute."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import pytest

from benchmarks.cases import Environments, Place
from benchmarks.scaling import efficiency
from benchmarks.worker_process import WorkerProcess
from benchmarks.workers.pinned_workers import cluster_variables, start_pinned
from tests.benchmarks.test_workers import losses

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="two cores are needed, on a system where processes can choose them",
)

TELL = "import os, sys; print(sorted(os.sched_getaffinity(0)), os.environ['NAME'])"


def test_each_process_has_a_core_of_its_own() -> None:
    before = os.sched_getaffinity(0)
    processes = start_pinned([sys.executable, "-c", TELL], [{"NAME": "a"}, {"NAME": "b"}])
    told = [process.communicate(timeout=60)[0].split() for process in processes]
    first, second = sorted(before)[:2]
    assert told == [[f"[{first}]", "a"], [f"[{second}]", "b"]]
    assert os.sched_getaffinity(0) == before


def test_more_processes_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    with pytest.raises(RuntimeError, match="2 processes are to have a core each"):
        start_pinned(["nobody"], [{}, {}])


def test_workers_are_of_one_cluster() -> None:
    configs = [json.loads(variables["TF_CONFIG"]) for variables in cluster_variables(3)]
    clusters = [config["cluster"] for config in configs]
    assert clusters[0] == clusters[1] == clusters[2]
    assert len(set(clusters[0]["worker"])) == 3
    assert [config["task"] for config in configs] == [
        {"type": "worker", "index": index} for index in range(3)
    ]


@pytest.mark.slow
def test_two_workers_compute_what_two_devices_of_one_process_do() -> None:
    place = Place("cpu", 2)
    case = efficiency.make_cases([place], Environments())[0]
    options = dataclasses.replace(
        case.ours.options, batch_size=None, steps_per_epoch=4, steps_per_call=2
    )
    side = dataclasses.replace(case.ours, options=options)
    command, variables = Environments().command(side), Environments().variables(side)
    with WorkerProcess(side.name, command, variables) as worker:
        worker.read_answer(120)
        got = [worker.ask({"epochs": 1}, 120)["loss"] for _ in range(2)]
    assert got == pytest.approx(losses("jax_scan_loop", 2), rel=1e-4)
    assert got[1] < got[0]
