"""Quick restarts give bit-identical training, with real workers."""

from __future__ import annotations

import sys

import pytest

from stratagem.launch.plan.options import LaunchOptions
from stratagem.launch.restart.launcher import launch

PROGRAM = """
import hashlib, os, signal, sys, time

loaded = "jax" in sys.modules

import stratagem as sg
import jax
import keras
import numpy as np

if len(sys.argv) > 1:  # once more, with programs that another process has compiled
    jax.config.update("jax_enable_compilation_cache", False)
strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(3)]
    model = keras.Sequential([keras.layers.Input((8,)), *layers])
    model.compile("adam", "mse", metrics=["mae"])
rng = np.random.default_rng(0)
x, y = rng.random((60, 8), "float32"), rng.random((60, 3), "float32")
model.fit(x, y, batch_size=7, epochs=2, verbose=0)
weights = b"".join(np.asarray(value).tobytes() for value in model.get_weights())
index = strategy.cluster_resolver.task_id
print(index, loaded, hashlib.sha256(weights).hexdigest(), flush=True)
if len(sys.argv) == 1 and os.environ["STRATAGEM_RESTART_COUNT"] == "0":
    if index == 1:
        signal.raise_signal(signal.SIGKILL)
    time.sleep(1000)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forked on Linux only")
def test_forked_workers_with_kept_programs_have_the_same_weights(folder, capfd) -> None:
    (folder / "train.py").write_text(PROGRAM)
    options = LaunchOptions(workers=2, max_restarts=1, devices_per_worker=1)
    assert launch([sys.executable, "train.py"], options).exit_code == 0
    assert launch([sys.executable, "train.py", "anew"], LaunchOptions(workers=2)).exit_code == 0
    lines = [line.split()[2:] for line in capfd.readouterr().out.splitlines() if "Gloo" not in line]
    assert sorted((index, loaded) for index, loaded, _ in lines) == sorted(
        (index, loaded) for index in "01" for loaded in ("False", "True", "True")
    )
    assert len({digest for _, _, digest in lines}) == 1
