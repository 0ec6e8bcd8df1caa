"""The secret of a run, as other users of the machines could look for it."""

from __future__ import annotations

from pathlib import Path

from validation.slurm.cluster import Cluster
from validation.slurm.scripts import script_of, wait_for

# Every user can run the system's Python; the worker needs nothing else.
_WORKER = """
import os, pathlib, time
pathlib.Path("secret").write_text(os.environ["STRATAGEM_SECRET"])
pathlib.Path("process").write_text(str(os.getpid()))
while not pathlib.Path("end").exists():
    time.sleep(0.1)
"""


def test_secret_is_seen_by_its_user_only(cluster: Cluster) -> None:
    folder = cluster.folder / "alice"
    (folder / "worker.py").write_text(_WORKER)
    script = script_of(
        "lockstep.py", worker_replicas=1, python="/usr/bin/python3", script="worker.py"
    )
    job = cluster.submit(script, folder, user="alice")
    wait_for(lambda: (folder / "process").exists(), cluster.logs)
    secret = (folder / "secret").read_text()
    assert len(secret) == 64

    # All that Slurm tells: about the job, to anyone; its script, to its user.
    shown = cluster.run("scontrol", "show", "job", "--details", job, user="mallory")
    assert secret not in shown
    assert secret not in cluster.run("scontrol", "write", "batch_script", job, "-", user="alice")

    # What the machines show: environments to the user only, command lines to anyone.
    process = (folder / "process").read_text()
    own = cluster.run("cat", f"/proc/{process}/environ", user="alice")
    assert secret in own
    other = cluster.run("cat", f"/proc/{process}/environ", user="mallory", check=False)
    assert "Permission denied" in other
    assert secret not in other
    assert secret not in cluster.run("ps", "-eo", "args", user="mallory")

    # The controller's state and the nodes' spools.
    held = [path for path in _files(cluster.folder, folder) if secret.encode() in path.read_bytes()]
    for path in held:
        assert "Permission denied" in cluster.run("cat", str(path), user="mallory", check=False)
    spool = next(cluster.folder.glob("spool-*/job*/slurm_script"))
    assert "Permission denied" in cluster.run("cat", str(spool), user="mallory", check=False)

    (folder / "end").touch()
    cluster.wait(job)


def _files(folder: Path, but_not: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and but_not not in path.parents]
