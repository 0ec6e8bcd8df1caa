"""Self-test of an installation: trains under every strategy, and compares the weights with NumPy.

Each case runs in processes of its own, so that a crash fails that case only:
`python -m stratagem.cli.doctor.selftest NAME`.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from stratagem import environment
from stratagem.cli.doctor.findings import Finding, error, note, ok, under

# Linear regression by gradient descent in NumPy: the numbers that every strategy must reach.

# Neither the rows nor the batches divide evenly: 11 rows are batches of 4, 4 and 3.
_NUM_ROWS, _NUM_FEATURES = 11, 3
BATCH_SIZE, EPOCHS, LEARNING_RATE = 4, 3, 0.1


def data() -> tuple[np.ndarray, np.ndarray]:
    """Returns features, shape (11, 3), and labels, shape (11, 1), float32."""
    random = np.random.default_rng(0)
    features = random.normal(size=(_NUM_ROWS, _NUM_FEATURES)).astype("float32")
    return features, (features @ np.array([[1.0], [-2.0], [0.5]], "float32") + 0.25)


def trained_weights() -> np.ndarray:
    """Returns kernel and bias after training from zero, one vector, float64."""
    features, labels = (array.astype("float64") for array in data())
    inputs = np.concatenate([features, np.ones((_NUM_ROWS, 1))], axis=1)
    weights = np.zeros((_NUM_FEATURES + 1, 1))
    for _ in range(EPOCHS):
        for first in range(0, _NUM_ROWS, BATCH_SIZE):
            rows = inputs[first : first + BATCH_SIZE]
            errors = rows @ weights - labels[first : first + BATCH_SIZE]
            weights -= LEARNING_RATE * 2 * rows.T @ errors / len(rows)
    return weights[:, 0]


MARKER = "STRATAGEM_WEIGHTS"
_LIMIT_S = 300
# float32, over 9 updates.
_TOLERANCE = 1e-5
_ERROR = re.compile(r"^(\[[^\]]*\] )?[\w.]+(Error|Exception|Interrupt)\b")
_MAX_LENGTH = 200


@dataclasses.dataclass(frozen=True)
class Case:
    """One strategy, by its name in `strategies`, and its title in findings.

    `num_workers` processes are started by `stratagem launch`; 0 is one process without it. The case
    is skipped without the module that it `needs`.
    """

    name: str
    title: str
    num_workers: int = 0
    needs: str | None = None
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


CASES = (
    Case("default", "no strategy"),
    Case("one_device", "OneDeviceStrategy"),
    Case("mirrored", "MirroredStrategy"),
    Case("sharded", 'MirroredStrategy(shard_state="all")'),
    Case("central_storage", "CentralStorageStrategy"),
    Case("hybrid", "HybridStrategy"),
    Case(
        "tpu",
        "TPUStrategy, CPU devices as chips",
        variables={"STRATAGEM_TPU_PLATFORM": "cpu", "JAX_PLATFORMS": "cpu"},
    ),
    Case("multi_worker", "MultiWorkerMirroredStrategy, 2 processes", num_workers=2),
    Case("parameter_server", "ParameterServerStrategy, 2 servers", needs="zmq"),
)


def check_cases(cases: Iterable[Case] = CASES) -> Iterator[Finding]:
    """Runs cases one after another; a finding says whether the weights are NumPy's."""
    return under("self-test", map(check_case, cases))


def check_case(case: Case, limit_s: float = _LIMIT_S) -> Finding:
    """Runs a case and compares its weights with the reference."""
    if case.needs is not None and importlib.util.find_spec(case.needs) is None:
        return note(f"{case.title}: skipped, because {case.needs} is not installed.")
    launcher = ["-m", "stratagem", "launch", "--workers", str(case.num_workers)]
    program = [
        *(launcher if case.num_workers else ()),
        "-m",
        "stratagem.cli.doctor.selftest",
        case.name,
    ]
    try:
        finished = subprocess.run(  # noqa: S603 - our own program
            [sys.executable, *program],
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
            env={
                **environment.snapshot_outside_cluster(),
                "JAX_NUM_CPU_DEVICES": "2",
                **case.variables,
            },
        )
    except subprocess.TimeoutExpired:
        problem = f"not finished after {limit_s:.0f} s"
    else:
        lines = [line for line in finished.stdout.splitlines() if MARKER in line]
        if finished.returncode or len(lines) != max(case.num_workers, 1):
            problem = _error_of(finished)
        else:
            found = [json.loads(line.partition(MARKER)[2]) for line in lines]
            largest = max(float(np.abs(one["weights"] - trained_weights()).max()) for one in found)
            if largest <= _TOLERANCE:
                return ok(f"{case.title}: the weights of NumPy, by {_replicas(found[-1])}.")
            problem = f"weights differ by {largest:.1e}"
    shown = f"JAX_NUM_CPU_DEVICES=2 python {' '.join(program)}"
    return error(f"{case.title}: {problem}.", f"run {shown} for the whole output.")


def _replicas(found: Mapping[str, Any]) -> str:
    return f"{found['replicas']} replica{'s' * (found['replicas'] != 1)}"


def _error_of(finished: subprocess.CompletedProcess[str]) -> str:
    """Returns the first line of the last error that a case printed."""
    lines = [line for line in (finished.stdout + finished.stderr).splitlines() if line.strip()]
    errors = [line for line in lines if _ERROR.search(line)]
    found = (errors or lines or [f"exit code {finished.returncode} without output"])[-1]
    return found.strip()[:_MAX_LENGTH]


# The program of a case.


def strategies() -> dict[str, Callable[[], Any]]:
    """Returns what makes the strategy of each case; loads JAX."""
    import jax

    import stratagem as sg

    def replica_devices() -> list[str] | None:
        """Returns two CPU devices on a machine without several accelerators."""
        is_alone = jax.default_backend() == "cpu" or jax.local_device_count() == 1
        return ["cpu:0", "cpu:1"] if is_alone else None

    return {
        "default": sg.get_strategy,
        "one_device": lambda: sg.OneDeviceStrategy(jax.local_devices()[0]),
        "mirrored": lambda: sg.MirroredStrategy(replica_devices()),
        "sharded": lambda: sg.MirroredStrategy(replica_devices(), shard_state="all"),
        "central_storage": lambda: sg.CentralStorageStrategy(replica_devices()),
        "hybrid": lambda: sg.HybridStrategy(replica_devices(), placement={"kernel": "central"}),
        "tpu": lambda: sg.TPUStrategy(),
        "multi_worker": sg.MultiWorkerMirroredStrategy,
        "parameter_server": lambda: sg.ParameterServerStrategy(num_workers=1, num_servers=2),
    }


def train(name: str) -> None:
    """Trains under a strategy, by `fit`, and prints the weights."""
    import keras

    features, labels = data()
    strategy = strategies()[name]()
    with strategy.scope():
        model = keras.Sequential(
            [
                keras.layers.Input((features.shape[1],)),
                keras.layers.Dense(1, kernel_initializer="zeros"),
            ]
        )
        model.compile(keras.optimizers.SGD(LEARNING_RATE), "mse")
    arguments: dict[str, Any] = {"verbose": 0}  # Keras annotates it as str
    model.fit(features, labels, batch_size=BATCH_SIZE, epochs=EPOCHS, shuffle=False, **arguments)
    kernel, bias = model.get_weights()
    weights = [*kernel[:, 0].tolist(), *bias.tolist()]
    found = {"weights": weights, "replicas": strategy.num_replicas_in_sync}
    print(MARKER, json.dumps(found), flush=True)


if __name__ == "__main__":
    train(sys.argv[1])
