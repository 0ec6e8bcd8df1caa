"""Runs the benchmark: two workers on two hosts, a model and a method at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console

from benchmarks.cases import Environments
from benchmarks.machine import busy_cores, describe_machine
from benchmarks.report import write_json
from benchmarks.runner import Effort
from benchmarks.slow_links.curves import Point, Training, num_timed_steps, target_loss
from benchmarks.slow_links.links import LINKS, Link, TwoHosts, two_hosts
from benchmarks.slow_links.methods import METHODS, TASKS, Method, TaskSize
from benchmarks.slow_links.report import draw_curves, make_table, show_claims
from benchmarks.worker_process import WorkerError, WorkerProcess

__all__ = ["run_slow_links"]

_ROOT = Path(__file__).parents[2]
_MODULE = "benchmarks.workers.slow_link_training"
_QUICK = TaskSize(num_steps=20, point_steps=10)
_LIMIT_S = 300.0
_NUM_CORES = 2
_WARM_STEPS = 2
# What is trained as a whole on the slowest link, too: the first and the last of the comparison.
_WHOLE_TASK, _WHOLE_METHODS, _WHOLE_LINK = "transformer", ("DiLoCo, H=50", "lockstep"), LINKS[2]


class _Ask(Protocol):
    """Has both workers train so many steps, and validate afterwards if asked to."""

    def __call__(self, num_steps: int, *, validates: bool = False) -> dict[str, Any]: ...


def run_slow_links(
    environments: Environments,
    effort: Effort,
    console: Console,
    output: Path,
    *,
    only: str = "",
    is_quick: bool = False,
) -> bool:
    """Trains, prints a table for each model and writes figures and plots. Needs root and iproute2.

    Args:
        environments: whose own interpreter trains.
        effort: not used; curves are not repeated.
        console: of the tables.
        output: folder of the results.
        only: models whose name contains this, or "whole" for the runs on the slow link alone.
        is_quick: a few steps of two methods.

    Returns:
        Whether all went well.
    """
    del effort
    results = _Results(output)
    methods = (METHODS[0], METHODS[8]) if is_quick else METHODS
    failures: list[dict[str, str]] = []

    def attempt(name: str, train: Callable[[], None]) -> None:
        try:
            with console.status(name):
                train()
        except WorkerError as error:
            failures.append({"case": name, "error": str(error)})
            console.print(f"Failed: {name}\n{error}", style="red", markup=False)

    with two_hosts() as hosts:
        for task, size in TASKS.items():
            if only not in task:
                continue
            own = _QUICK if is_quick else size
            # What is compared most comes first, for those who do not wait for the rest.
            for method in (methods[0], *reversed(methods[1:])):
                train = _Trainer(environments, hosts, task, own, method)
                attempt(f"{task}, {method.name}", lambda train=train: results.add(train.measure()))
            _show(results.of(task), console, output)
        if only in ("", "whole") and not is_quick:
            for name in _WHOLE_METHODS:
                method = next(one for one in METHODS if one.name == name)
                train = _Trainer(environments, hosts, _WHOLE_TASK, TASKS[_WHOLE_TASK], method)
                target = target_loss(results.of(_WHOLE_TASK))
                attempt(
                    f"{name} on {_WHOLE_LINK.name}",
                    lambda train=train, target=target: results.add_whole(train.whole(target)),
                )
    results.write(failures)
    show_claims(console, results.trainings, results.wholes)
    console.print(f"Results and plots: {output / 'slow_links'}*.json, .png", soft_wrap=True)
    return not failures


class _Results:
    """What was measured, also by earlier runs into the same folder."""

    def __init__(self, output: Path) -> None:
        self._file = output / "slow_links.json"
        known = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.trainings = [Training.of(one) for one in known.get("trainings", [])]
        self.wholes: list[dict[str, Any]] = known.get("wholes", [])

    def of(self, task: str) -> list[Training]:
        """Returns the trainings of a model in the order of the methods."""
        by_method = {one.method: one for one in self.trainings if one.task == task}
        return [by_method[one.name] for one in METHODS if one.name in by_method]

    def add(self, training: Training) -> None:
        """Adds a training, in place of an earlier one of the same method and model."""
        key = (training.task, training.method)
        kept = [one for one in self.trainings if (one.task, one.method) != key]
        self.trainings = [*kept, training]
        self.write([])

    def add_whole(self, whole: dict[str, Any]) -> None:
        """Adds a training on the slow link."""
        kept = [one for one in self.wholes if one["method"] != whole["method"]]
        self.wholes = [*kept, whole]
        self.write([])

    def write(self, failures: Sequence[dict[str, str]]) -> None:
        """Writes all, after each training, so that an interrupted run leaves the others."""
        told = {
            "benchmark": "slow_links",
            "machine": describe_machine(None),
            "links": [dataclasses.asdict(one) for one in LINKS],
            "trainings": [dataclasses.asdict(one) for one in self.trainings],
            "wholes": self.wholes,
            "failures": list(failures),
        }
        write_json(self._file, told)


@dataclasses.dataclass(frozen=True)
class _Trainer:
    """Trains a model by a method."""

    environments: Environments
    hosts: TwoHosts
    task: str
    size: TaskSize
    method: Method

    def measure(self) -> Training:
        """Trains on the fast link, then times steps on the others."""
        fast, *slower = LINKS
        with self._workers(fast) as ask:
            points = self._curve(ask, float("-inf"))
            timed = points[1:]
            num_steps = timed[-1].steps - points[0].steps
            step_s = {fast.name: (timed[-1].seconds - points[0].seconds) / num_steps}
            sent = timed[-1].num_bytes - points[0].num_bytes
            step_bytes = {fast.name: sent / num_steps}
            for link in slower:
                self.hosts.become(link)
                ask(max(_WARM_STEPS, self.method.period))
                count = num_timed_steps(
                    step_s[fast.name],
                    step_bytes[fast.name],
                    link.rate_bits_per_s,
                    self.method.period,
                )
                told = ask(count)
                step_s[link.name] = told["seconds"] / count
                step_bytes[link.name] = told["num_bytes"] / count
        return Training(
            task=self.task,
            method=self.method.name,
            points=tuple(points),
            step_s=step_s,
            step_bytes=step_bytes,
        )

    def whole(self, target: float) -> dict[str, Any]:
        """Trains on the slow link until a validation loss is reached."""
        with self._workers(_WHOLE_LINK) as ask:
            points = self._curve(ask, target)
        return {
            "task": self.task,
            "method": self.method.name,
            "link": _WHOLE_LINK.name,
            "target": target,
            "points": [dataclasses.asdict(one) for one in points],
        }

    def _curve(self, ask: _Ask, target: float) -> list[Point]:
        points: list[Point] = []
        # The first step compiles: its time is left out.
        seconds, num_bytes = 0.0, ask(1)["num_bytes"]
        while len(points) * self.size.point_steps < self.size.num_steps:
            told = ask(self.size.point_steps - (not points), validates=True)
            seconds, num_bytes = seconds + told["seconds"], num_bytes + told["num_bytes"]
            points.append(
                Point(
                    steps=(len(points) + 1) * self.size.point_steps,
                    seconds=seconds,
                    num_bytes=num_bytes,
                    loss=told["loss"],
                    validation_loss=told["validation_loss"],
                )
            )
            if points[-1].validation_loss <= target:
                break
        return points

    @contextlib.contextmanager
    def _workers(self, link: Link) -> Generator[_Ask]:
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
        variables = {
            **self.environments.shell_variables(),
            "TF_CONFIG": json.dumps(
                {"cluster": cluster, "task": {"type": "worker", "index": host}}
            ),
            "STRATAGEM_SECRET": "of the two workers of a benchmark",
            "JAX_PLATFORMS": "cpu",
            "KERAS_BACKEND": "jax",
        }
        options = {
            "task": self.task,
            "method": dataclasses.asdict(self.method),
            "steps": self.size.num_steps,
        }
        command = [str(self.environments.ours), "-m", _MODULE, json.dumps(options)]
        name = f"{self.task}, {self.method.name}, worker {host}"
        return WorkerProcess(name, [*self.hosts.command(host), *command], variables, _ROOT)


def _show(trainings: Sequence[Training], console: Console, output: Path) -> None:
    if not trainings or trainings[0].method != METHODS[0].name:
        return
    console.print(make_table(trainings))
    machine = describe_machine(None)
    told = f"two workers, each on a core of {machine['cpu']}; busy before: {busy_cores(0.2):.1f}"
    draw_curves(output / f"slow_links_{trainings[0].task}.png", trainings, told)
