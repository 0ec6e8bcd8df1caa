"""Several workers train an Estimator to the weights of one process."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.multiprocess.cluster import PROGRAMS, run_cluster
from tests.unit.estimator.model_functions import (
    dense_layers,
    examples,
    plain_model,
    weights_of_model,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("num_devices", [1, 2])
def test_workers_train_one_model(num_devices: int, tmp_path: Path) -> None:
    """38 examples, batches of 8 in all: the second worker gets less of the last one."""
    model_dir, folder = tmp_path / "model", tmp_path / "results"
    folder.mkdir()
    program = str(PROGRAMS / "estimating.py")
    ended = run_cluster([program, str(num_devices), str(model_dir), str(folder)], 2)
    assert [one.code for one in ended] == [0, 0], [one.errors for one in ended]

    x, y = examples(38)
    model = plain_model(dense_layers(), keras.optimizers.Adam(0.01), (5,))
    for start in range(0, 38, 8):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    expected = model.evaluate(x, y, verbose=0, return_dict=True)
    weights, logits = weights_of_model(model), np.asarray(model(x))
    for index in range(2):
        found = dict(np.load(folder / f"process-{index}.npz"))
        assert found["calls"].tolist() == [index, index]
        assert found["global_step"] == 5
        np.testing.assert_allclose(found["loss"], expected["loss"], atol=1e-5)
        np.testing.assert_allclose(found["accuracy"], expected["accuracy"], atol=1e-5)
        np.testing.assert_allclose(found["logits"], logits, atol=1e-5)
        for name, value in weights.items():
            np.testing.assert_allclose(found[name], value, atol=1e-5)
        served = sg.estimator.load_exported(str(found["exported"]))["serving_default"](x)
        np.testing.assert_allclose(served["logits"], logits, atol=1e-5)
    # One process has written, and one only.
    assert len(list(model_dir.glob("events*"))) == 1
    assert len(list((model_dir / "export").iterdir())) == 1
