"""Evaluation record: metrics of past evaluations, one JSON line each.

Early stopping and exporters read it. Event files would need TensorBoard's package.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

FILE_NAME = "eval_metrics.jsonl"


def write_eval_metrics(eval_dir: str | os.PathLike[str], metrics: Mapping[str, Any]) -> None:
    """Appends the scalar metrics of an evaluation to a folder's record."""
    folder = Path(eval_dir)
    folder.mkdir(parents=True, exist_ok=True)
    scalars = {
        name: np.asarray(value).item() for name, value in metrics.items() if np.ndim(value) == 0
    }
    # A single write of a whole line, so that a concurrent reader never sees its start missing.
    with open(folder / FILE_NAME, "ab", buffering=0) as file:
        file.write(json.dumps(scalars).encode() + b"\n")


def read_eval_metrics(eval_dir: str | os.PathLike[str]) -> dict[int, dict[str, Any]]:
    """Returns the metrics of a folder's evaluations.

    Args:
        eval_dir: the folder; see `Estimator.eval_dir`.

    Returns:
        A dict from global steps, in order, to dicts of metrics by name. A later evaluation of the
        same step wins. Empty if there is no record.

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
        except ValueError:  # truncated when the writing process died
            continue
        found.setdefault(int(metrics["global_step"]), {}).update(metrics)
    return dict(sorted(found.items()))
