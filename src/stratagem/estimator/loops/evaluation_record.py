"""What evaluations have given, kept as a line each, for those who decide by it later.

Event files are for TensorBoard, and need its package to be read: this needs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FILE_NAME", "read_eval_metrics", "write_eval_metrics"]

FILE_NAME = "eval_metrics.jsonl"


def write_eval_metrics(eval_dir: str | os.PathLike[str], metrics: Mapping[str, Any]) -> None:
    """Adds an evaluation to the record of a folder.

    Args:
        eval_dir: the folder; made if it is missing.
        metrics: what `Estimator.evaluate` returns, `global_step` among it. What is no scalar is
            left out.
    """
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    scalars = {
        name: np.asarray(value).item() for name, value in metrics.items() if np.ndim(value) == 0
    }
    # One write of a whole line, so that a reader at the same time never sees a part of it first.
    with open(folder / FILE_NAME, "ab", buffering=0) as file:
        file.write(json.dumps(scalars).encode() + b"\n")


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Returns what the evaluations of a folder have given.

    Args:
        eval_dir: the folder; see `Estimator.eval_dir`.

    Returns:
        Global step to metrics by name, in the order of the steps; of two evaluations of one step
        the later counts.

    Example:
        >>> sg.estimator.read_eval_metrics("no/such/folder")
        {}

    Source: tensorflow/estimator early_stopping.py, read_eval_metrics.
    """
    found: dict[int, dict[str, Any]] = {}
    try:
        lines = (Path(eval_dir) / FILE_NAME).read_bytes().split(b"\n")
    except FileNotFoundError:
        return {}
    for line in lines:
        try:
            metrics = json.loads(line)
        except ValueError:  # cut short by the end of the process that wrote it
            continue
        found.setdefault(int(metrics["global_step"]), {}).update(metrics)
    return dict(sorted(found.items()))
