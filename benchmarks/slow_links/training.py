"""Two workers on two hosts, which train a model by a method."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Generator
from pathlib import Path
from typing import Any, Protocol

from benchmarks.cases import Environments
from benchmarks.slow_links.curves import Point, Training, num_timed_steps
from benchmarks.slow_links.links import LINKS, Link, TwoHosts
from benchmarks.slow_links.methods import Method, Trial
from benchmarks.worker_process import WorkerProcess

__all__ = ["Trainer"]

_ROOT = Path(__file__).parents[2]
_MODULE = "benchmarks.workers.slow_link_training"
_LIMIT_S = 300.0
_WARM_STEPS = 2


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
    """

    environments: Environments
    hosts: TwoHosts
    name: str
    trial: Trial
    method: Method

    def measure(self) -> Training:
        """Trains on the trial's first link, then times steps on the others.

        Raises:
            WorkerError: a worker ended, or did not answer in time.
        """
        own, *others = self.trial.links
        with self._workers(own) as ask:
            points = self._curve(ask)
            first, last = points[0], points[-1]
            num_steps = last.steps - first.steps
            step_s = {own.name: (last.seconds - first.seconds) / num_steps}
            step_bytes = {own.name: (last.num_bytes - first.num_bytes) / num_steps}
            for link in others:
                self.hosts.become(link)
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
        return Training(
            task=self.name,
            method=self.method.name,
            points=tuple(points),
            step_s=step_s,
            step_bytes=step_bytes,
        )

    def _curve(self, ask: _Ask) -> list[Point]:
        points: list[Point] = []
        # The first step compiles: its time is left out.
        seconds, num_bytes = 0.0, ask(1)["num_bytes"]
        for steps in range(
            self.trial.point_steps, self.trial.num_steps + 1, self.trial.point_steps
        ):
            told = ask(self.trial.point_steps - (not points), validates=True)
            seconds, num_bytes = seconds + told["seconds"], num_bytes + told["num_bytes"]
            points.append(
                Point(
                    steps=steps,
                    seconds=seconds,
                    num_bytes=num_bytes,
                    loss=told["loss"],
                    validation_loss=told["validation_loss"],
                )
            )
        return points

    @contextlib.contextmanager
    def _workers(self, link: Link) -> Generator[_Ask]:
        # They meet, and measure their sums, over the fast link.
        self.hosts.become(LINKS[0])
        with contextlib.ExitStack() as stack:
            workers = [stack.enter_context(self._worker(host)) for host in range(2)]
            for one in workers:
                one.read_answer(_LIMIT_S)
            self.hosts.become(link)

            def ask(num_steps: int, *, validates: bool = False) -> dict[str, Any]:
                for one in workers:
                    one.tell({"steps": num_steps, "validates": validates})
                answers = [one.read_answer(_LIMIT_S) for one in workers]
                return answers[0]

            yield ask

    def _worker(self, host: int) -> WorkerProcess:
        cluster = {"worker": self.hosts.addresses}
        task = {"type": "worker", "index": host}
        variables = {
            **self.environments.shell_variables(),
            "TF_CONFIG": json.dumps({"cluster": cluster, "task": task}),
            "STRATAGEM_SECRET": "of the two workers of a benchmark",
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
        }
        options = {
            "task": self.trial.model,
            "method": dataclasses.asdict(self.method),
            "steps": self.trial.num_steps,
        }
        command = [str(self.environments.ours), "-m", _MODULE, json.dumps(options)]
        name = f"{self.name}, {self.method.name}, worker {host}"
        return WorkerProcess(name, [*self.hosts.command(host), *command], variables, _ROOT)
