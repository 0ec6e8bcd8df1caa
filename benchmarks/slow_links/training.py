"""Two workers on two hosts, which train a model by a method."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cases import Environments
from benchmarks.slow_links.curves import Point, Training, num_timed_steps
from benchmarks.slow_links.links import Link, TwoHosts
from benchmarks.slow_links.methods import Method, Trial
from benchmarks.worker_process import WorkerProcess

__all__ = ["Trainer", "train_alone"]

_ROOT = Path(__file__).parents[2]
_MODULE = "benchmarks.workers.slow_link_training"
_LIMIT_S = 300.0
_WARM_STEPS = 2
# An answer comes within the limit.
_ALONE_STEPS = 10


class _Ask(Protocol):
    """Has both workers train so many steps, and validate afterwards if asked to."""

    def __call__(self, num_steps: int, *, validates: bool = False) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Trains a model by a method.

    Args:
        environments: whose own interpreter trains.
        hosts: of the workers.
        name: of the trial.
        trial: what is trained.
        method: how.
        caches: folder for what runs on a link leave for later ones on it, such as times of sums.
        weights: file with those to begin from; None for random ones.
    """

    environments: Environments
    hosts: TwoHosts
    name: str
    trial: Trial
    method: Method
    caches: Path
    weights: Path | None = None

    def measure(self) -> Training:
        """Trains on the trial's first link, then times steps on the others.

        Raises:
            WorkerError: a worker ended, or did not answer in time.
        """
        own, *others = self.trial.links
        with self._workers(own) as ask:
            points, cpu_s = self._curve(ask)
            first, last = points[0], points[-1]
            num_steps = last.steps - first.steps
            step_s = {own.name: (last.seconds - first.seconds) / num_steps}
            step_bytes = {own.name: (last.num_bytes - first.num_bytes) / num_steps}
            step_cpu_s = {own.name: cpu_s / num_steps}
        for link in others:
            # Other workers: how they sum is chosen on their link, and a connection remembers the
            # link that it was made on.
            with self._workers(link) as ask:
                ask(max(_WARM_STEPS, self.method.period))
                count = num_timed_steps(
                    step_s[own.name],
                    step_bytes[own.name],
                    link.rate_bits_per_s,
                    self.method.period,
                )
                told = ask(count)
            step_s[link.name] = told["seconds"] / count
            step_bytes[link.name] = told["num_bytes"] / count
            step_cpu_s[link.name] = told["cpu_s"] / count
        return Training(
            task=self.name,
            method=self.method.name,
            points=tuple(points),
            step_s=step_s,
            step_bytes=step_bytes,
            step_cpu_s=step_cpu_s,
        )

    def _curve(self, ask: _Ask) -> tuple[list[Point], float]:
        """Returns the points, and the CPU seconds of a worker from the first one on."""
        points: list[Point] = []
        cpu_s = 0.0
        # The first step compiles: its time is left out.
        seconds, num_bytes = 0.0, ask(1)["num_bytes"]
        for steps in range(
            self.trial.point_steps, self.trial.num_steps + 1, self.trial.point_steps
        ):
            told = ask(self.trial.point_steps - (not points), validates=True)
            seconds, num_bytes = seconds + told["seconds"], num_bytes + told["num_bytes"]
            cpu_s += told["cpu_s"] if points else 0.0
            points.append(
                Point(
                    steps=steps,
                    seconds=seconds,
                    num_bytes=num_bytes,
                    loss=told["loss"],
                    validation_loss=told["validation_loss"],
                )
            )
        return points, cpu_s

    @contextlib.contextmanager
    def _workers(self, link: Link) -> Generator[_Ask]:
        """Starts both workers, on a link; yields what has them train."""
        self.hosts.become(link)
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(self._worker(host, link)) for host in range(2)]
            for one in workers:
                one.read_answer(_LIMIT_S)

            def ask(num_steps: int, *, validates: bool = False) -> dict[str, Any]:
                for one in workers:
                    one.tell({"steps": num_steps, "validates": validates})
                answers = [one.read_answer(_LIMIT_S) for one in workers]
                return answers[0]

            yield ask

    def _worker(self, host: int, link: Link) -> WorkerProcess:
        cluster = {"worker": self.hosts.addresses}
        config = {"cluster": cluster, "task": {"type": "worker", "index": host}}
        options = {
            "task": self.trial.model,
            "method": dataclasses.asdict(self.method),
            "steps": self.trial.num_steps,
            "first_steps": 0 if self.weights is None else self.trial.first_steps,
            "weights": None if self.weights is None else str(self.weights),
        }
        variables = {
            "TF_CONFIG": json.dumps(config),
            "STRATAGEM_CACHE_DIR": str(self.caches / link.name.replace("/", " per ")),
        }
        name = f"{self.name}, {self.method.name}, worker {host}"
        return _start(self.environments, self.hosts, host, name, options, variables)


def train_alone(
    environments: Environments, hosts: TwoHosts, name: str, trial: Trial, weights: Path
) -> None:
    """Trains the first steps of a trial in one worker, and writes its weights to a file.

    Raises:
        WorkerError: the worker ended, or did not answer in time.
    """
    options = {
        "task": trial.model,
        "method": dataclasses.asdict(trial.methods[0]),
        "steps": trial.first_steps,
        "first_steps": 0,
        "weights": None,
    }
    with _start(environments, hosts, 0, f"{name}, first steps", options, {}) as worker:
        worker.read_answer(_LIMIT_S)
        for _ in range(trial.first_steps // _ALONE_STEPS):
            question = {"steps": _ALONE_STEPS, "validates": False, "save": str(weights)}
            worker.ask(question, _LIMIT_S)


def _start(
    environments: Environments,
    hosts: TwoHosts,
    host: int,
    name: str,
    options: Mapping[str, Any],
    variables: Mapping[str, str],
) -> WorkerProcess:
    environment = {
        **environments.shell_variables(),
        "STRATAGEM_SECRET": "of the two workers of a benchmark",
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        **variables,
    }
    command = [str(environments.ours), "-m", _MODULE, json.dumps(options)]
    return WorkerProcess(name, [*hosts.command(host), *command], environment, _ROOT)
