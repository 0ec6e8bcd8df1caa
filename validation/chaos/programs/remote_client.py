"""Sends a function to a cluster again until it has returned, and prints its value.

Arguments: the cluster in JSON, a folder for progress and results, and the number of steps. The
function goes on from the last recorded step. Steps are slow until there is a file `hurry`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import stratagem as sg

_STEP_S = 0.05
_NUM_LAST, _LAST_STEP_S = 40, 0.5
_MOST_TRIES = 12
_PAUSE_S = 0.5


def count(folder: str, num_steps: int) -> int:
    """Records steps from the last recorded one on; returns their sum."""
    steps, hurry = Path(folder) / "counted", Path(folder) / "hurry"
    steps.touch()
    lines = steps.read_text().splitlines()
    with steps.open("a", buffering=1) as file:
        for step in range(len(lines), num_steps):
            file.write(f"{step} {os.getpid()} {time.monotonic()}\n")
            if not hurry.exists():
                time.sleep(_LAST_STEP_S if num_steps - step < _NUM_LAST else _STEP_S)
    return sum(int(line.split()[0]) for line in steps.read_text().splitlines())


def main() -> None:
    spec, folder, num_steps = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    for number in range(1, _MOST_TRIES + 1):
        try:
            cluster = sg.remote.RemoteCluster(spec)
            value = cluster.run(count, (str(folder), num_steps))
        except (RuntimeError, sg.errors.UnavailableError, sg.errors.DeadlineExceededError) as error:
            print(f"try {number} failed: {type(error).__name__}: {error}", flush=True)
            if number == _MOST_TRIES:
                raise
            time.sleep(_PAUSE_S)
        else:
            (folder / "value").write_text(str(value))
            return


if __name__ == "__main__":
    main()
