"""One program of an Estimator as chief, workers, parameter server and evaluator: real processes."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from stratagem.estimator.steps import read_variable
from tests.multiprocess.cluster import PROGRAMS, addresses
from tests.multiprocess.programs import estimated
from tests.unit.launch.remote.living import descendants, wait_for_end

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 240.0
_POLL_S = 0.1


class Tasks:
    """The tasks of a cluster, one program; what one prints goes into a file.

    `max_steps` and `strategy` are the program's.
    """

    def __init__(
        self,
        jobs: Mapping[str, int],
        folder: Path,
        max_steps: int,
        strategy: str = "",
        program: str = "estimated.py",
    ) -> None:
        found = iter(addresses(sum(jobs.values())))
        all_tasks = {job: [next(found) for _ in range(count)] for job, count in jobs.items()}
        self._evaluators = all_tasks.pop("evaluator", [])
        self._cluster = all_tasks
        self._folder = folder
        self._command = [str(PROGRAMS / program), str(folder), str(max_steps), strategy]
        self.processes: dict[tuple[str, int], subprocess.Popen[bytes]] = {}

    def start(self, kind: str, index: int = 0) -> None:
        config = {"cluster": self._cluster, "task": {"type": kind, "index": index}}
        with (self._folder / f"{kind}-{index}.log").open("ab") as log:
            self.processes[kind, index] = subprocess.Popen(
                [sys.executable, *self._command],
                env={
                    **os.environ,
                    "TF_CONFIG": json.dumps(config),
                    "JAX_PLATFORMS": "cpu",
                    "KERAS_BACKEND": "jax",
                    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
                    "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
                },
                cwd=_ROOT,
                stdout=log,
                stderr=log,
            )

    def start_all(self) -> None:
        for kind, known in self._cluster.items():
            for index in range(len(known)):
                self.start(kind, index)
        for index in range(len(self._evaluators)):
            self.start("evaluator", index)

    def kill(self, kind: str, index: int = 0) -> None:
        self.processes[kind, index].send_signal(signal.SIGKILL)
        self.processes[kind, index].wait()

    def kill_all(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self.processes.values():
            process.wait()

    def wait(self) -> None:
        """Until all have ended well."""
        deadline_s = time.monotonic() + _LIMIT_S
        while any(process.poll() is None for process in self.processes.values()):
            codes = [process.poll() for process in self.processes.values()]
            assert not any(codes), self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(_POLL_S)
        assert {process.returncode for process in self.processes.values()} == {0}, self.said()

    def said(self) -> str:
        logs = sorted(self._folder.glob("*.log"))
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in logs)


@contextmanager
def tasks(
    jobs: Mapping[str, int],
    folder: Path,
    max_steps: int,
    strategy: str = "",
    program: str = "estimated.py",
) -> Iterator[Tasks]:
    """All tasks, started; whatever is left of them is killed, and nothing of them stays."""
    before = descendants(os.getpid())
    made = Tasks(jobs, folder, max_steps, strategy, program)
    try:
        made.start_all()
        yield made
    finally:
        made.kill_all()
    assert wait_for_end(descendants(os.getpid()) - before) == set()


def steps_of(folder: Path, task: str) -> list[int]:
    """The global steps that the processes of a task have seen, in the order of the processes."""
    files = sorted(folder.glob(f"{task}-*.steps"), key=lambda path: path.stat().st_mtime)
    return [int(line) for path in files for line in path.read_text().split()]


def wait_for_steps(made: Tasks, folder: Path, task: str, step: int, files: int = 1) -> None:
    deadline_s = time.monotonic() + _LIMIT_S
    while (
        max(steps_of(folder, task), default=0) < step
        or len(list(folder.glob(f"{task}-*.steps"))) < files
    ):
        assert time.monotonic() < deadline_s, made.said()
        assert made.processes["chief", 0].poll() is None, made.said()
        time.sleep(_POLL_S)


def evaluations(folder: Path) -> list[dict[str, float]]:
    record = folder / "model" / "eval" / "eval_metrics.jsonl"
    return [json.loads(line) for line in record.read_text().splitlines()]


def metrics_of(checkpoint: Path) -> dict[str, float]:
    """Loss and accuracy of what is held out, by NumPy, with the weights of a checkpoint."""
    images, labels = (part[estimated.NUM_TRAINED :] for part in estimated.data())

    def layer(name: str, inputs: np.ndarray) -> np.ndarray:
        kernel = read_variable(str(checkpoint), f"{name}/kernel")
        return inputs @ kernel + read_variable(str(checkpoint), f"{name}/bias")

    logits = layer("dense_1", np.maximum(layer("dense", images), 0)).astype("float64")
    right = np.exp(logits)[np.arange(len(labels)), labels] / np.exp(logits).sum(1)
    return {
        "loss": -np.log(right).mean(),
        "accuracy": np.mean(logits.argmax(1) == labels),
        "global_step": int(read_variable(str(checkpoint), "global_step")),
    }


def check_evaluations(folder: Path, last: Sequence[int]) -> None:
    """The numbers of the evaluator are those of the checkpoints that it names."""
    results = evaluations(folder)
    assert results[-1]["global_step"] in last
    for one in results:
        expected = metrics_of(folder / "model" / f"model.ckpt-{one['global_step']}")
        assert one == pytest.approx(expected, rel=1e-5)


def one_device(num_steps: int, global_batch_size: int) -> dict[str, np.ndarray]:
    """Weights after steps of SGD with momentum, by NumPy's rule and plain Keras layers."""
    import jax
    import keras

    images, labels = estimated.data()
    initializer = keras.initializers.GlorotUniform
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(16, "relu", kernel_initializer=initializer(seed=1)),
            keras.layers.Dense(10, kernel_initializer=initializer(seed=2)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with jax.default_device(jax.devices("cpu")[0]):
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
        for step in range(num_steps):
            rows = np.arange(step * global_batch_size, (step + 1) * global_batch_size)
            picked = rows % estimated.NUM_TRAINED
            model.train_on_batch(images[picked], labels[picked])
    names = ("dense/kernel", "dense/bias", "dense_1/kernel", "dense_1/bias")
    return dict(zip(names, model.get_weights(), strict=True))


@pytest.mark.slow
def test_two_workers_in_lockstep_train_what_one_device_does(tmp_path: Path) -> None:
    num_steps = 45
    jobs = {"worker": 2, "evaluator": 1}
    with tasks(jobs, tmp_path, num_steps, "MultiWorkerMirroredStrategy") as made:
        made.wait()
    checkpoint = tmp_path / "model" / f"model.ckpt-{num_steps}"
    for name, value in one_device(num_steps, 2 * estimated.BATCH_SIZE).items():
        found = read_variable(str(checkpoint), name)
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-5, err_msg=name)
    check_evaluations(tmp_path, [num_steps])
    results = json.loads((tmp_path / "evaluator-0.json").read_text())
    assert results == pytest.approx(metrics_of(checkpoint), rel=1e-5)


@pytest.mark.slow
def test_the_command_of_the_guide_starts_all_tasks(tmp_path: Path) -> None:
    """On a machine where nothing was set up: no token of Ray, no secret."""
    guide = (_ROOT / "docs" / "guides" / "estimator.md").read_text()
    line = next(line for line in guide.splitlines() if line.startswith("stratagem launch"))
    *flags, script = shlex.split(line, comments=True)[1:]
    assert script == "train.py"
    program = [str(PROGRAMS / "estimated.py"), str(tmp_path), "60", ""]
    own = ("RAY_", "STRATAGEM_SECRET")
    inherited = {name: text for name, text in os.environ.items() if not name.startswith(own)}
    ended = subprocess.run(
        [sys.executable, "-m", "stratagem", *flags, *program],
        env={
            **inherited,
            "HOME": str(tmp_path / "home"),
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}",
        },
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S * 2,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    trained = sorted(step for task in ("chief", "worker") for step in steps_of(tmp_path, task))
    assert trained[-1] in range(60, 63)
    check_evaluations(tmp_path, range(60, 63))


@pytest.mark.slow
def test_tasks_may_be_killed_and_started_again(tmp_path: Path) -> None:
    jobs = {"chief": 1, "worker": 2, "ps": 1, "evaluator": 1}
    with tasks(jobs, tmp_path, 100_000) as made:
        for worker in range(2):
            wait_for_steps(made, tmp_path, f"worker-{worker}", 30)
        made.kill("worker", 1)
        made.start("worker", 1)
        wait_for_steps(made, tmp_path, "worker-1", 60, files=2)
        made.kill_all()
    # The worker that came back went on where the others were.
    again = max(tmp_path.glob("worker-1-*.steps"), key=lambda path: path.stat().st_mtime)
    assert int(again.read_text().split()[0]) > 30
    saved = [int(path.name.rsplit("-", 1)[1]) for path in tmp_path.glob("model/model.ckpt-*[0-9]")]
    last = max(saved) + 150
    for path in tmp_path.glob("*.steps"):
        path.unlink()
    with tasks(jobs, tmp_path, last) as made:
        made.wait()
    steps = sorted(step for task in ("chief", "worker") for step in steps_of(tmp_path, task))
    assert steps[0] in range(max(saved) + 1, max(saved) + 4)  # from the last checkpoint on
    assert len(steps) in range(150, 153)
    check_evaluations(tmp_path, range(last, last + 3))
    assert evaluations(tmp_path)[-1]["accuracy"] > 0.7
