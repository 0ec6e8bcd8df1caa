"""Assignments outside steps: those of one worker alone end the run, and no others do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster

_PROGRAM = PROGRAMS / "apart.py"


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [2, 3])
def test_assignments_of_all_workers_pass(num_workers: int) -> None:
    for ended in run_cluster([str(_PROGRAM), "all"], num_workers):
        assert ended.code == 0, ended.errors
        assert ended.output.splitlines()[-1] == "done"


def _slow(*row: str | int) -> Any:
    return pytest.param(*row, marks=pytest.mark.slow)


def _line_of(code: str) -> int:
    (line,) = [
        number
        for number, text in enumerate(Path(_PROGRAM).read_text().splitlines(), 1)
        if text.strip().startswith(code)
    ]
    return line


@pytest.mark.parametrize(
    ("how", "worker", "path", "code"),
    [
        ("rate of a callback", 0, "adam/learning_rate", "model.fit("),
        _slow("warm-up", 1, "adam/learning_rate", "self.model.optimizer"),
        _slow("weights", 1, ".*/kernel", "model.layers[0].set_weights([np.ones"),
        _slow("one value in a loop", 1, ".*/kernel", "model.layers[0].kernel.assign_add"),
        _slow("unequal values", 0, ".*/bias", "model.layers[0].bias.assign(np.full"),
        _slow("statistics", 0, ".*/moving_mean", "model.layers[1].moving_mean"),
        _slow("at the end", 1, ".*/bias", "model.layers[0].bias.assign(np.ones"),
    ],
)
def test_assignments_of_one_worker_end_all_and_name_the_line(
    how: str, worker: int, path: str, code: str
) -> None:
    every = run_cluster([str(_PROGRAM), how], 2)
    for ended in every:
        assert ended.code == 1, ended.errors
        assert ("done" in ended.output) == (how == "at the end")
        assert re.search(
            r"RuntimeError: worker \d .* assigned '[^']*' outside a step", ended.errors
        )
        place = re.escape(f"{_PROGRAM}:{_line_of(code)}")
        # Averages are assigned on all workers meanwhile, which the message then names as well.
        assert re.search(
            rf"worker {worker} \S+ assigned ('{path}'|another).* at {place}", ended.errors
        )
        assert re.search(rf"assigned '{path}'", ended.errors)
    if how == "rate of a callback":
        assert "(in ReduceLROnPlateau.on_epoch_end)" in every[1].errors
