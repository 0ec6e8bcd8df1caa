"""Lockstep training by scripts of `stratagem slurm render`, submitted by `sbatch`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from validation.slurm.cluster import NODES, Cluster
from validation.slurm.scripts import log_of, script_of, wait_for, weights

_NewFolder = Callable[[str], Path]
_STEP_S = "1"

# A job that takes all nodes at once.
_URGENT = f"""#!/bin/bash
#SBATCH --partition=urgent --nodes={len(NODES)} --exclusive --output=urgent.log
sleep 1
"""


@pytest.fixture(scope="module")
def undisturbed(cluster: Cluster) -> list[bytes]:
    """Weights of a training on two nodes that nothing interrupts."""
    folder = cluster.home / "undisturbed"
    folder.mkdir()
    job = cluster.submit(script_of("lockstep.py", "."), folder)
    assert cluster.wait(job)["NumNodes"] == "2"
    return weights(folder, 2)


def test_all_ranks_of_two_nodes_agree(cluster: Cluster, new_folder: _NewFolder) -> None:
    folder = new_folder("agree")
    script = script_of("lockstep.py", ".", worker_replicas=4, tasks_per_node=2)
    job = cluster.submit(script, folder)
    cluster.wait(job)
    hosts = dict(re.findall(r"rank (\d) of 4 on (node\d)", log_of(folder, job)))
    assert hosts["0"] == hosts["1"] != hosts["2"] == hosts["3"]
    assert len(set(weights(folder, 4))) == 1


@pytest.mark.parametrize("reason", ["preempted", "requeued"])
def test_requeued_job_ends_with_the_same_bits(
    cluster: Cluster, new_folder: _NewFolder, undisturbed: list[bytes], reason: str
) -> None:
    folder = new_folder(reason)
    job = cluster.submit(script_of("lockstep.py", ".", _STEP_S), folder)
    backup = folder / "backup"
    wait_for(lambda: backup.exists() and any(backup.iterdir()), cluster.logs)
    if reason == "preempted":  # Slurm sends SIGTERM, and the partition's grace time later SIGKILL
        cluster.wait(cluster.submit(_URGENT, folder))
    else:  # ends the job at once
        cluster.run("scontrol", "requeue", job)
    assert cluster.wait(job)["Restarts"] == "1"
    begins = re.findall(r"begins at step (\d+)", log_of(folder, job))
    assert begins[:2] == ["0", "0"]
    assert begins[2] == begins[3] != "0"
    assert weights(folder, 2) == undisturbed


def test_launcher_of_each_node_names_the_first_failure_and_restarts(
    cluster: Cluster, new_folder: _NewFolder, undisturbed: list[bytes]
) -> None:
    folder = new_folder("launcher")
    program = Path(__file__).parent / "programs" / "lockstep.py"
    launch = f"{sys.executable} -m stratagem launch --workers 1 --max-restarts 1 {program} ."
    script = f"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --output=digits-%j.log
export STRATAGEM_SECRET=$({sys.executable} -m stratagem secret)
srun --ntasks-per-node=1 {launch}
"""
    job = cluster.submit(script, folder, CRASHES_ONCE="1")
    cluster.wait(job)
    log = log_of(folder, job)
    assert "OSError: the disk of this rank is gone" in log
    assert "worker 1" in log
    assert weights(folder, 2) == undisturbed


def test_elements_of_an_array_on_one_node_do_not_meet(
    cluster: Cluster, new_folder: _NewFolder
) -> None:
    folder = new_folder("array")
    script = script_of(
        "lockstep.py", ".", _STEP_S, worker_replicas=2, tasks_per_node=2, array="0-1"
    )
    array = cluster.submit(script, folder)
    for element in ("0", "1"):
        begun = folder / element / "begun-1"
        wait_for(begun.exists, cluster.logs)
    # The number of the last element is that of the array, too.
    elements = {element: cluster.show(f"{array}_{element}") for element in ("0", "1")}
    last = next(number for number, fields in elements.items() if fields["JobId"] == array)
    assert elements["0"]["BatchHost"] == elements["1"]["BatchHost"]
    cluster.run("scancel", "--signal=TERM", f"{array}_{last}")
    for element in elements:
        restarts = cluster.wait(f"{array}_{element}")["Restarts"]
        assert restarts == ("1" if element == last else "0")
    logs = [log_of(folder, fields["JobId"]) for fields in elements.values()]
    ports = [set(re.findall(r"24; .*:(\d+)", log)) for log in logs]
    assert len(ports[0]) == len(ports[1]) == 1
    assert ports[0] != ports[1]
    assert weights(folder / "0", 2) == weights(folder / "1", 2)
