"""Files of weights and two processes: no process holds the model, and plain Keras reads them."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest

from tests.multiprocess.cluster import PROGRAMS, run_cluster

_TENSOR_BYTES = 2**22


@pytest.mark.slow
def test_files_are_read_and_written_by_tensors(tmp_path: Path) -> None:
    layers = [keras.layers.Dense(1024, use_bias=False) for _ in range(24)]
    plain = keras.Sequential([keras.Input((1024,)), *layers])
    plain.save_weights(tmp_path / "plain.weights.h5")
    command = [str(PROGRAMS / "weight_files.py"), str(tmp_path)]
    # Freed memory is returned to the system, so that it does not count.
    for ended in run_cluster(command, 2, MALLOC_MMAP_THRESHOLD_="65536"):
        assert ended.code == 0, ended.errors
    expected = plain.get_weights()
    total = sum(float(one.sum(dtype=np.float64)) for one in expected)
    for rank in range(2):
        with np.load(tmp_path / f"process-{rank}.npz") as seen:
            assert seen["checksum"] == pytest.approx(total)
            assert seen["own"] == 12 * _TENSOR_BYTES
            # Each process drew other numbers, and then took those of process 0.
            # An array of them is stacked for all devices of this process. No array is kept.
            assert seen["build"] < seen["own"] + 12 * _TENSOR_BYTES, rank
            assert np.all(seen["draws"] == (rank == 0))
            # The shards exist before. A gathered value is on a device, on the host, and written.
            assert seen["load"] < 0.2 * seen["own"] + _TENSOR_BYTES, rank
            assert seen["save"] < 5 * _TENSOR_BYTES, rank
    again = keras.models.clone_model(plain)
    again.load_weights(tmp_path / "back.weights.h5")
    assert all(map(np.array_equal, again.get_weights(), expected))
