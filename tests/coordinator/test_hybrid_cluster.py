"""HybridStrategy on parameter servers that are processes: on this machine, and on others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import stratagem as sg
from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.remote.living import descendants, wait_for_end

_LIMIT_S = 150.0
_NETWORK = "10.82.0"
_CLUSTER = {
    "chief": [f"{_NETWORK}.1:2222"],
    "ps": [f"{_NETWORK}.2:2222", f"{_NETWORK}.3:2222"],
}
_TASKS = [("chief", 0), ("ps", 0), ("ps", 1)]
# Machines do not share it; `ip netns exec` has a view of its own of what is mounted.
_OWN_RAY_FOLDER = 'mkdir -p /tmp/ray && mount -t tmpfs none /tmp/ray && exec "$0" "$@"'
_SERVER = "from stratagem.cli import main; main()"
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
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Parameter servers were started again:RuntimeWarning"),
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
                tables: Any = strategy._tables  # pyright: ignore[reportPrivateUsage]
                tables._cluster.servers.kill(0)
                killed.set()

        callback = keras.callbacks.LambdaCallback(on_train_batch_end=kill)
        model.fit(x, y, batch_size=2, epochs=4, verbose=0, callbacks=[callback])
        assert killed.is_set()
        assert int(model.optimizer.iterations) == 128
        assert strategy.serving.client.describe()[0]["restored_version"] is not None
        assert model.evaluate(x, y, verbose=0) < before / 2


@pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here")
def test_chief_trains_with_servers_of_other_machines(tmp_path) -> None:
    (tmp_path / "program.py").write_text(_PROGRAM)
    variables = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2] / "src"),
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    }
    before = descendants(os.getpid())
    outputs = [tmp_path / f"{kind} {index}" for kind, index in _TASKS]  # Ray prints a lot
    with hosts(len(_TASKS), _NETWORK) as made:
        processes: list[subprocess.Popen[bytes]] = []
        for (command, _), (kind, index), output in zip(made, _TASKS, outputs, strict=True):
            config = {"cluster": _CLUSTER, "task": {"type": kind, "index": index}}
            words = ["-c", _SERVER, "server"] if kind == "ps" else ["program.py"]
            with output.open("w") as file:
                process = subprocess.Popen(
                    [*command, "sh", "-c", _OWN_RAY_FOLDER, sys.executable, *words],
                    env={**variables, "TF_CONFIG": json.dumps(config)},
                    cwd=tmp_path,
                    stdout=file,
                )
            processes.append(process)
        try:
            deadline_s = time.monotonic() + _LIMIT_S
            while any(process.poll() is None for process in processes):
                assert not any(process.poll() for process in processes)  # the others would wait
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert wait_for_end(descendants(os.getpid()) - before) == set()
    served, mirrored = json.loads(outputs[0].read_text().splitlines()[-1])
    np.testing.assert_allclose(served, mirrored, rtol=1e-5)
