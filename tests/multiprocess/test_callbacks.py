"""Keras's callbacks in two processes: each works as with one, or is refused at the beginning."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster

_PROGRAM = str(PROGRAMS / "callbacks.py")
_REFUSED = {"BackupAndRestore", "OrbaxCheckpoint", "TensorBoard"}


@pytest.mark.slow
def test_callbacks_work_as_in_one_process_or_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    results: list[dict[str, Any]] = []
    for ended in run_cluster([_PROGRAM, str(tmp_path / "two")], 2):
        assert ended.code == 0, ended.errors
        results.append(json.loads(ended.output.splitlines()[-1]))
    assert results[0] == results[1]
    assert not (tmp_path / "two" / "backup").exists()
    assert not list((tmp_path / "two" / "orbax").glob("*"))  # which Orbax makes at once
    for name, result in results[0].items():
        assert isinstance(result, str) == (name in _REFUSED), (name, result)
    assert "use sg.BackupAndRestore" in results[0]["BackupAndRestore"]
    assert "use sg.TensorBoard" in results[0]["TensorBoard"]

    with (tmp_path / "two" / "log.csv").open() as file:
        assert [row["epoch"] for row in csv.DictReader(file)] == ["0", "1", "2"]
    assert isinstance(keras.models.load_model(tmp_path / "two" / "best.keras"), keras.Model)
    assert results[0]["EarlyStopping"][0] == 2
    weights = {name: np.array(one[1]) for name, one in results[0].items() if name not in _REFUSED}
    # `fit` ends with the averages in any case; what was swapped has to come back right for it.
    np.testing.assert_allclose(weights["SwapEMAWeights"], weights["CSVLogger"], rtol=1e-5)
    assert not np.allclose(weights["LearningRateScheduler"], weights["CSVLogger"], atol=1e-4)
    np.testing.assert_allclose(weights["TerminateOnNaN"], weights["CSVLogger"], rtol=1e-6)
