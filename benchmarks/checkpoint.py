"""`checkpoint`: a state that steps change, saved behind training and not, and restored.

Beside Orbax by hand and torch.distributed.checkpoint. All sides hold their state at the same time,
on the CPU or with `--devices gpu` there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.runner import Run
from benchmarks.sides import Answers, Case, Side, Task, worker_side

_SMALLEST_SIZE_BYTES, _BRIEF_SIZE_BYTES = 10**6, 250 * 10**6
_NUM_ROUNDS = 5


def checkpoint(run: Run) -> None:
    """Measures how long training waits for a save, and how long a restore takes."""
    size_bytes = run.size_bytes
    if run.effort.is_smallest or run.effort.is_brief:
        most = _SMALLEST_SIZE_BYTES if run.effort.is_smallest else _BRIEF_SIZE_BYTES
        size_bytes = min(size_bytes, most)
    num_rounds = min(run.effort.num_rounds, _NUM_ROUNDS)
    platform = run.places[0].platform
    for title, is_async, figures in (
        ("saves that training waits for", False, {"save": "blocked", "restore": "restore"}),
        ("saves behind training", True, {"stall": "stall"}),
    ):
        if run.wants(title):
            with tempfile.TemporaryDirectory() as folder:
                case = _case(title, is_async, size_bytes, figures, Path(folder), platform)
                run.compare(case, num_rounds)


def _case(
    title: str,
    is_async: bool,
    size_bytes: int,
    figures: dict[str, str],
    folder: Path,
    platform: str,
) -> Case:
    variables = {"KERAS_BACKEND": "jax", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}

    def side(name: str, kind: str, environment: str = "ours") -> Side:
        options = {"bytes": size_bytes, "is_async": is_async, "folder": str(folder / kind)}
        options |= {"kind": kind, "platform": platform}
        given = variables if platform == "gpu" else None
        return worker_side(name, "checkpoint_rounds", environment, given, **options)

    return Case(
        name=f"{size_bytes / 1e9:g} GB, {title}",
        ours=side("Stratagem", "ours"),
        references=(
            side("Orbax by hand", "orbax"),
            side("PyTorch DCP", "torch", "peers"),
        ),
        tasks=(
            Task(
                question=lambda amount: {},
                figures={
                    name: lambda amount, answers, key=key: 1 / answers[0][key]
                    for name, key in figures.items()
                },
                unit="1/s",
                is_timed=False,
                details=_details,
            ),
        ),
    )


def _details(answers: Answers) -> dict[str, float]:
    """Returns seconds, the restore's bandwidth beside the disk's, and peaks in states."""
    titles = {
        "step": "step, s",
        "blocked": "save blocks, s",
        "stall": "stall, s",
        "first_stall": "first stall, s",
        "behind": "later steps, s",
        "whole": "until written, s",
        "restore": "restore, s",
        "share": "restore / disk",
        "save_peak": "peak of a save",
        "restore_peak": "peak of a restore",
    }
    return {title: answers[0][key] for key, title in titles.items()}
