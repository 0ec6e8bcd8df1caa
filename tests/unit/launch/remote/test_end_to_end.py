"""Four servers in network namespaces that have no file of their client, and what it runs on them.

Each server is a host of its own, whose folder of the client is empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multiprocess.namespaces import can_make_hosts, hosts
from tests.unit.launch.remote.living import PrintedLines, descendants, wait_for_end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_make_hosts(), reason="no network namespaces can be made here"),
]

_SOURCE = Path(__file__).parents[4] / "src"
_TASKS = [("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
_NETWORK = "10.79.0"
_CLUSTER = {
    "chief": [f"{_NETWORK}.1:2222"],
    "ps": [f"{_NETWORK}.2:2222"],
    "worker": [f"{_NETWORK}.3:2222", f"{_NETWORK}.4:2222"],
}
_SERVER = "from stratagem.cli import main; main()"

_LAYERS = """
import keras

class Scaled(keras.layers.Layer):
    def call(self, x):
        return 0.5 * x
"""

_TRAIN = """
import json, sys
import keras
import numpy as np
import stratagem as sg
from flowers import layers

if __name__ == "__main__":
    sg.connect_to_cluster(json.loads(sys.argv[1]))
    x = np.random.default_rng(0).normal(size=(256, 4)).astype("float32")
    y = x @ np.float32([[1], [2], [3], [4]])
    strategy = sg.ParameterServerStrategy()
    with strategy.scope():
        hidden = [keras.layers.Dense(8) for _ in range(int(sys.argv[2]))]
        model = keras.Sequential([keras.Input((4,)), layers.Scaled(), *hidden,
                                  keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.02), "mse")
    losses = model.fit(x, y, batch_size=32, epochs=20, verbose=2).history["loss"]
    print("losses", json.dumps(losses), flush=True)
    sys.stdout.write("50%\\r100%\\n")
    strategy.close()
    sys.exit(3)
"""


_ENDLESS = """
import json, os, sys, threading
import stratagem as sg

sg.connect_to_cluster(json.loads(sys.argv[1]), client_timeout_s=6.0)
print("runs as", os.getpid(), flush=True)
threading.Event().wait()
"""


_SHARES = f"""
import keras
import numpy as np
import stratagem as sg

if __name__ == "__main__":
    sg.connect_to_cluster("http://{_NETWORK}.1:8265")
    with sg.ParameterServerStrategy(num_workers=1, num_servers=1) as strategy:
        with strategy.scope():
            variable = keras.Variable([1.0, 2.0, 3.0])
        print("values", np.asarray(variable.value).tolist())
"""


_LOCKSTEP = """
import json, sys
import keras
import numpy as np
import stratagem as sg
from flowers import layers

sg.connect_to_cluster(json.loads(sys.argv[1]))
strategy = sg.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), layers.Scaled(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(x, x.sum(1), batch_size=16, epochs=2, verbose=0)
weights = np.asarray(model.layers[1].kernel).ravel().tolist()
print("weights", weights, f"of {strategy.num_replicas_in_sync} replicas")
"""

_PROGRAMS = {"endless": _ENDLESS, "lockstep": _LOCKSTEP, "shares": _SHARES, "train": _TRAIN}


class Machines:
    """The laptop, and servers that run."""

    def __init__(
        self,
        laptop: list[str],
        folder: Path,
        variables: dict[str, str],
        cluster: dict[str, list[str]],
    ) -> None:
        self._laptop = laptop
        self._cluster = json.dumps(cluster)
        self._folder = folder
        self._variables = variables

    @contextlib.contextmanager
    def client(self, script: str, *arguments: str) -> Iterator[PrintedLines]:
        process = subprocess.Popen(
            [*self._laptop, sys.executable, script, self._cluster, *arguments],
            cwd=self._folder,
            env=self._variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with contextlib.closing(PrintedLines(process)) as client:
            yield client


@contextlib.contextmanager
def _served(
    folder: Path, network: str, cluster: dict[str, list[str]], tasks: list[tuple[str, int]]
) -> Iterator[Machines]:
    """Servers of all tasks, and a laptop beside them that has the programs."""
    (folder / "flowers").mkdir()
    (folder / "flowers" / "layers.py").write_text(_LAYERS)
    for name, text in _PROGRAMS.items():
        (folder / f"{name}.py").write_text(text)
    variables = {
        **os.environ,
        "PYTHONPATH": str(_SOURCE),
        "JAX_PLATFORMS": "cpu",
        "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    before = descendants(os.getpid())
    with hosts(len(tasks) + 1, network) as made, contextlib.ExitStack() as stack:
        servers: list[subprocess.Popen[bytes]] = []
        for (command, _), (kind, index) in zip(made, tasks, strict=False):
            config = {"cluster": cluster, "task": {"type": kind, "index": index}}
            # `ip netns exec` has a view of its own of what is mounted.
            hidden = 'mount -t tmpfs none "$0" && exec "$@"'
            words = [sys.executable, "-c", _SERVER, "server"]
            servers.append(
                subprocess.Popen(
                    [*command, "sh", "-c", hidden, str(folder), *words],
                    env={**variables, "TF_CONFIG": json.dumps(config)},
                    cwd="/",
                )
            )
            stack.callback(servers[-1].wait, 60)
        # All others end when the leader does.
        stack.callback(servers[0].send_signal, signal.SIGTERM)
        yield Machines(made[-1][0], folder, variables, cluster)
    assert wait_for_end(descendants(os.getpid()) - before) == set()


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Iterator[Machines]:
    with _served(tmp_path_factory.mktemp("laptop"), _NETWORK, _CLUSTER, _TASKS) as made:
        yield made


def test_cluster_without_servers_trains_in_lockstep(tmp_path) -> None:
    cluster = {"worker": ["10.80.0.1:2222", "10.80.0.2:2222"]}
    with (
        _served(tmp_path, "10.80.0", cluster, [("worker", 0), ("worker", 1)]) as made,
        made.client("lockstep.py") as client,
    ):
        code, output = client.end()
    assert code == 0, output
    said = [line for line in output.splitlines() if "] weights" in line]
    assert sorted(line[:10] for line in said) == ["[worker 0]", "[worker 1]"]
    assert len({line[10:] for line in said}) == 1
    assert "of 2 replicas" in said[0]


def test_two_models_train_one_after_the_other(machines) -> None:
    outputs = []
    for num_layers in ("1", "2"):
        with machines.client("train.py", num_layers) as client:
            code, output = client.end()
        assert code == 3, output
        outputs.append(output)
    for output in outputs:
        (line,) = [line for line in output.splitlines() if line.startswith("losses")]
        losses = json.loads(line.removeprefix("losses "))
        assert losses[0] > 5.0
        assert losses[-1] < 0.5 * losses[0]
        assert "Epoch 20/20\n" in output
        assert output.endswith("50%\n100%\n") or output.endswith("50%\r100%\n")


def test_ray_cluster_of_somebody_else_is_given_by_its_url(machines) -> None:
    with machines.client("shares.py") as client:
        code, output = client.end()
    assert code == 0, output
    assert output.splitlines()[-1] == "values [1.0, 2.0, 3.0]"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGINT])
def test_program_ends_after_its_client_was_killed_or_interrupted(machines, signum) -> None:
    with machines.client("endless.py") as client:
        pid = int(client.wait_for("runs as").split()[-1])
        # `ip` runs the script as a child, or becomes it.
        own = descendants(os.getpid()) & ({client.process.pid} | descendants(client.process.pid))
        assert pid in descendants(os.getpid())
        for one in own if signum == signal.SIGINT else {client.process.pid}:
            os.kill(one, signum)
        assert wait_for_end([pid], timeout_s=60.0) == set()
