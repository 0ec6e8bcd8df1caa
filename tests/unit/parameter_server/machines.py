"""One program as the chief and the workers of a cluster, and its servers, each on its own machine.

The machines are network namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.multiprocess.namespaces import hosts
from tests.unit.launch.remote.living import descendants, wait_for_end

_LIMIT_S = 150.0
# Machines do not share it; `ip netns exec` has a view of its own of what is mounted.
_OWN_RAY_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$0" "$@"'
_SERVER = "from stratagem.cli import main; main()"


def run_on_machines(
    program: str, cluster: Mapping[str, Sequence[str]], network: str, folder: Path
) -> list[str]:
    """Runs a cluster until all its tasks have ended well, and left no process.

    Args:
        program: what all tasks but servers run.
        cluster: the addresses of its tasks, machine by machine.
        network: the first three numbers of these addresses.
        folder: for the program and what it prints.

    Returns:
        What each task has printed.
    """
    (folder / "program.py").write_text(program)
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[3] / "src"),
        "JAX_PLATFORMS": "cpu",
        "STRATAGEM_SECRET": "0123456789abcdef" * 4,
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    before = descendants(os.getpid())
    tasks = [
        (kind, index) for kind, addresses in cluster.items() for index in range(len(addresses))
    ]
    outputs = [folder / f"{kind} {index}" for kind, index in tasks]  # a pipe, unread, would fill
    with hosts(len(tasks), network) as made:
        processes: list[subprocess.Popen[bytes]] = []
        for (command, _), (kind, index), output in zip(made, tasks, outputs, strict=True):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            words = ["-c", _SERVER, "server"] if kind == "ps" else ["program.py"]
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*command, "sh", "-c", _OWN_RAY_FOLDER, sys.executable, *words],
                    env={**variables, "TF_CONFIG": json.dumps(config)},
                    cwd=folder,
                    stdout=file,
                )
            processes.append(process)
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while any(process.poll() is None for process in processes):
                assert not any(process.poll() for process in processes)  # the others would wait
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    said = [output.read_text() for output in outputs]
    assert [process.returncode for process in processes] == [0] * len(tasks), said
    assert wait_for_end(descendants(os.getpid()) - before) == set()
    return said
