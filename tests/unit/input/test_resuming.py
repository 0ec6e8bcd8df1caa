"""A loop interrupted within an epoch resumes in another process with the next example."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import json, pathlib, sys
import grain
import numpy as np
import stratagem as sg

kind, file, num_steps = sys.argv[1], pathlib.Path(sys.argv[2]), int(sys.argv[3])

examples = np.arange(33)
source = {
    "arrays": lambda: sg.input.Dataset(examples, batch_size=5, shuffle=True, seed=1),
    "grain workers": lambda: grain.MapDataset.source(examples).shuffle(1).to_iter_dataset()
        .batch(5).mp_prefetch(grain.MultiprocessingOptions(num_workers=2)),
}[kind]()

if __name__ == "__main__":
    strategy = sg.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.distribute_dataset(source)
    iterator = iter(dataset)
    if file.exists():
        iterator.set_state(json.loads(file.read_text()))
    seen = []
    while len(seen) < num_steps:
        batch = next(iterator, None)
        if batch is None:
            iterator = iter(dataset)
            continue
        seen.append([part.tolist() for part in strategy.local_results(batch)])
    file.write_text(json.dumps(iterator.get_state()))
    iterator.close()
    print(json.dumps(seen))
"""


def _run(program: Path, kind: str, file: Path, num_steps: int) -> list[list[list[int]]]:
    finished = subprocess.run(
        [sys.executable, str(program), kind, str(file), str(num_steps)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "grain workers"])
def test_another_process_resumes_with_the_next_example(kind: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    undisturbed = _run(program, kind, tmp_path / "whole.json", 18)  # two epochs and a half
    parts = [_run(program, kind, tmp_path / "parts.json", n) for n in (3, 15)]
    assert parts[0] + parts[1] == undisturbed
    examples = [n for step in undisturbed for part in step for n in part]
    assert sorted(examples[:33]) == sorted(examples[33:66]) == list(range(33))
