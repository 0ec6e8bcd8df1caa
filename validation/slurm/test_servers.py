"""Parameter servers by scripts of `stratagem slurm render`, submitted by `sbatch`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from validation.slurm.cluster import Cluster
from validation.slurm.scripts import log_of, script_of, wait_for

_NewFolder = Callable[[str], Path]


def _losses(folder: Path) -> tuple[float, float, int]:
    before, after, steps = (folder / "losses").read_text().split()
    return float(before), float(after), int(steps)


def test_servers_and_workers_of_one_job_train(cluster: Cluster, new_folder: _NewFolder) -> None:
    folder = new_folder("servers")
    script = script_of("servers.py", ".", ps_replicas=1, worker_replicas=2, tasks_per_node=2)
    job = cluster.submit(script, folder)
    assert cluster.wait(job)["NumNodes"] == "2"
    before, after, steps = _losses(folder)
    assert steps == 24
    assert after < before


def test_heterogeneous_job_saves_on_a_notice_and_goes_on(
    cluster: Cluster, new_folder: _NewFolder
) -> None:
    folder = new_folder("heterogeneous")
    script = script_of(
        "servers.py",
        ".",
        "1",
        ps_replicas=1,
        worker_replicas=1,
        tasks_per_node=2,
        heterogeneous=True,
    )
    job = cluster.submit(script, folder)
    wait_for((folder / "begun").exists, cluster.logs)
    # As Slurm sends it before the time limit.
    cluster.run("scancel", "--batch", "--signal=TERM", job)
    assert cluster.wait(job)["Restarts"] == "1"
    log = log_of(folder, job)
    first, second = re.findall(r"coordinator on (node\d) begins at step (\d+)", log)
    assert (first[1], int(second[1]) > 0) == ("0", True)
    (cluster_of_job,) = set(re.findall(r"^\{.*\}$", log, re.MULTILINE)[-1:])
    hosts = dict(re.findall(r"'(\w+)': \['(node\d)", cluster_of_job))
    assert hosts["chief"] == hosts["ps"] != hosts["worker"]
    before, after, steps = _losses(folder)
    assert steps == 24
    assert after < before
