"""HybridStrategy on parameter servers that are processes: on this machine, and on others."""

from __future__ import annotations

import json
import threading
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.multiprocess.namespaces import can_make_hosts
from tests.unit.parameter_server.machines import run_on_machines

_NETWORK = "10.82.0"
_CLUSTER = {
    "chief": [f"{_NETWORK}.1:2222"],
    "ps": [f"{_NETWORK}.2:2222", f"{_NETWORK}.3:2222"],
}
_PROGRAM = """
import json
import stratagem as sg
import keras
import numpy as np

x = np.random.default_rng(0).integers(0, 9000, (64, 2))
y = np.random.default_rng(1).normal(size=(64, 1)).astype("float32")
losses = []
for place in ("server", "mirrored"):
    with sg.HybridStrategy(placement={"table": place}) as strategy:
        keras.utils.set_random_seed(1)  # Ray draws numbers, too
        with strategy.scope():
            table = keras.layers.Embedding(9000, 8, name="table")
            head = [keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,), dtype="int32"), table, *head])
            model.compile("adagrad", "mse")
        told = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
        losses.append(told.history["loss"])
print(json.dumps(losses), flush=True)
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Parameter servers restarted:RuntimeWarning"),
]


@pytest.mark.usefixtures("ray_cluster")
def test_server_that_is_killed_in_a_fit_goes_on_from_its_journal() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 9000, (64, 2)), rng.normal(size=(64, 1)).astype("float32")
    placement = {"table": "server"}
    with sg.HybridStrategy(["cpu:0", "cpu:1"], placement=placement, num_servers=1) as strategy:
        with strategy.scope():
            table = keras.layers.Embedding(9000, 8, name="table")
            head = [keras.layers.Flatten(), keras.layers.Dense(1)]
            model = keras.Sequential([keras.Input((2,), dtype="int32"), table, *head])
            model.compile(keras.optimizers.Adagrad(0.2), "mse")
        before = model.evaluate(x, y, verbose=0)
        killed = threading.Event()

        def kill(step: int, logs: Any = None) -> None:
            if step == 20 and not killed.is_set():
                tables: Any = strategy._servers  # pyright: ignore[reportPrivateUsage]
                tables._cluster.servers.kill(0)
                killed.set()

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
        model.fit(x, y, batch_size=2, epochs=4, verbose=0, callbacks=[callback])
        assert killed.is_set()
        assert int(model.optimizer.iterations) == 128
        assert (
            strategy.placement.remote.variables.client.describe()[0]["restored_version"] is not None
        )
        assert model.evaluate(x, y, verbose=0) < before / 2


@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_chief_trains_with_servers_of_other_machines(tmp_path) -> None:
    outputs = run_on_machines(_PROGRAM, _CLUSTER, _NETWORK, tmp_path)
    served, mirrored = json.loads(outputs[0].splitlines()[-1])
    np.testing.assert_allclose(served, mirrored, rtol=1e-5)
