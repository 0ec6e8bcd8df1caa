"""Runs the sides of a case in turns, so that a drift of the machine meets all of them alike."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import select
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from benchmarks.report import Row, make_row
from benchmarks.sides import Answers, Case, Environments, Place, Side, Task
from benchmarks.workers.protocol import ANSWER_PREFIX

_Result = TypeVar("_Result")

_STDERR_TAIL_BYTES = 3000
_EXIT_LIMIT_S = 10.0


class WorkerError(RuntimeError):
    """A worker ended, or did not answer in time."""


class WorkerProcess:
    """A program that is started once, asked many times, and never waited for without a limit.

    Use it as a context manager: leaving it ends the process and its children.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path
    ) -> None:
        self.name = name
        self._command = list(command)
        self._buffer = b""
        # A file and not a pipe: nobody has to empty it.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process ends
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            cwd=folder,
            env=dict(environment),
            start_new_session=True,  # so that its own children can be ended with it
        )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_EXIT_LIMIT_S if self._process.poll() is None else 0)
        self._kill()
        self._process.stdout.close()
        self._stderr.close()

    def tell(self, question: Mapping[str, Any]) -> None:
        """Sends a question, whose answer `read_answer` waits for."""
        assert self._process.stdin is not None
        # A process that has ended tells why when its answer is read.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(question).encode() + b"\n")

    def read_answer(self, limit_s: float) -> dict[str, Any]:
        """Waits for the next answer."""
        deadline_s = time.monotonic() + limit_s
        while True:
            line, newline, rest = self._buffer.partition(b"\n")
            if not newline:
                self._read_more(deadline_s, limit_s)
                continue
            self._buffer = rest
            text = line.decode(errors="replace")
            if text.startswith(ANSWER_PREFIX):
                return json.loads(text.removeprefix(ANSWER_PREFIX))

    def _read_more(self, deadline_s: float, limit_s: float) -> None:
        assert self._process.stdout is not None
        remaining_s = max(0.0, deadline_s - time.monotonic())
        ready, _, _ = select.select([self._process.stdout], [], [], remaining_s)
        if not ready:
            self._kill()
            raise self._error(f"did not answer within {limit_s:g} s")
        more = os.read(self._process.stdout.fileno(), 1 << 16)
        if not more:
            self._kill()
            raise self._error(f"ended with exit code {self._process.returncode}")
        self._buffer += more

    def _kill(self) -> None:
        """Ends what is left of the process's group, after a moment to end by itself."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _error(self, what: str) -> WorkerError:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_TAIL_BYTES))
        tail = self._stderr.read().decode(errors="replace").strip() or "(nothing)"
        return WorkerError(
            f"Worker {self.name!r} {what}.\nIts command: {shlex.join(self._command)}\n"
            f"The end of its stderr:\n{tail}"
        )


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to measure, and how long to wait."""

    num_rounds: int = 4  # in each, every side does its work once
    round_s: float = 0.5  # what a round of one side should take
    start_limit_s: float = 300.0  # for a worker to start
    answer_limit_s: float = 600.0  # for an answer; the first one includes compiling
    is_brief: bool = False  # only what matters most, for all benchmarks in one go
    is_smallest: bool = False  # one short round, which measures nothing


class Fleet:
    """The processes of a side, which are asked together. Use as a context manager."""

    def __init__(self, side: Side, environments: Environments) -> None:
        self.side = side
        self._stack = contextlib.ExitStack()
        interpreter, common = str(environments.interpreter(side)), environments.variables(side)
        self._workers = [
            self._stack.enter_context(
                WorkerProcess(
                    side.name,
                    [interpreter, "-m", side.module, json.dumps(side.options)],
                    {**common, **variables},
                    side.folder,
                )
            )
            for variables in side.spread()
        ]

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def read_answers(self, limit_s: float) -> Answers:
        return [worker.read_answer(limit_s) for worker in self._workers]

    def ask(self, question: Mapping[str, Any], limit_s: float) -> Answers:
        for worker in self._workers:
            worker.tell(question)
        answers = self.read_answers(limit_s)
        for answer in answers:
            if not -1e30 < answer.get("loss", 0.0) < 1e30:  # NaN, too
                raise WorkerError(f"{self.side.name!r} trains to a loss of {answer['loss']}.")
        return answers


@dataclasses.dataclass
class Measured:
    """What a side answered to a task."""

    side: Side  # which
    versions: dict[str, str]  # of what it ran on
    first: Answers = ()  # answers of each process to what was asked before the rounds, together
    # amount of work and answers of each round.
    rounds: list[tuple[int, Answers]] = dataclasses.field(default_factory=list)

    def figures(self, figure: Callable[[int, Answers], float]) -> list[float]:
        return [figure(amount, answers) for amount, answers in self.rounds]

    def details(self, task: Task) -> dict[str, Any]:
        """Returns the medians of the details that are numbers, and the last of the others."""
        found = [
            task.details([{**one, **more} for one, more in zip(self.first, answers, strict=True)])
            for _, answers in self.rounds
        ]
        return {
            name: statistics.median(one[name] for one in found)
            if isinstance(found[-1][name], int | float)
            else found[-1][name]
            for name in found[-1]
        }


def order_of_round(num_sides: int, number: int) -> list[int]:
    """Who comes when: in each round somebody else is first."""
    return [(number + place) % num_sides for place in range(num_sides)]


def in_turns(
    measures: Sequence[Callable[[], _Result]], num_rounds: int, num_dropped: int = 0
) -> list[list[_Result]]:
    """Calls each once in each round; returns the results of each, without the first rounds."""
    found: list[list[_Result]] = [[] for _ in measures]
    for number in range(-num_dropped, num_rounds):
        for place in order_of_round(len(measures), number):
            result = measures[place]()
            if number >= 0:
                found[place].append(result)
    return found


def measure(
    case: Case, environments: Environments, effort: Effort
) -> list[tuple[Task, list[Measured]]]:
    """Measures the tasks of a case; returns for each what its sides answered, ours first."""
    sides = (case.ours, *case.references)
    if case.is_fresh:
        return [(task, _fresh_rounds(case, task, environments, effort)) for task in case.tasks]
    with contextlib.ExitStack() as stack:
        fleets = [stack.enter_context(Fleet(side, environments)) for side in sides]
        # One prepares while the next ones import.
        versions = [one.read_answers(effort.start_limit_s)[0]["versions"] for one in fleets]
        prepared: list[Answers] = [()] * len(fleets)
        if case.prepared:
            prepared = [one.ask(case.prepared, effort.answer_limit_s) for one in fleets]
        found: list[tuple[Task, list[Measured]]] = []
        for task in case.tasks:
            told = zip(sides, versions, prepared, strict=True)
            found.append((task, [Measured(*one) for one in told]))
            _rounds(task, fleets, found[-1][1], effort)
    return found


def _rounds(
    task: Task, fleets: Sequence[Fleet], measured: Sequence[Measured], effort: Effort
) -> None:
    def ask(place: int, amount: int) -> tuple[int, Answers]:
        return amount, fleets[place].ask(task.question(amount), effort.answer_limit_s)

    places = range(len(fleets))
    for place in places:  # compiles
        _, answers = ask(place, task.least)
        before = measured[place].first or [{}] * len(answers)
        measured[place].first = [{**one, **more} for one, more in zip(before, answers, strict=True)]
    amounts = [task.least for _ in places]
    if task.is_timed:
        seconds = [_seconds_of(functools.partial(ask, place, task.least)) for place in places]
        if task.is_even:
            seconds = [statistics.median(seconds) for _ in places]
        amounts = [max(task.least, round(task.least * effort.round_s / one)) for one in seconds]
    asked = [functools.partial(ask, place, amounts[place]) for place in places]
    for one, rounds in zip(measured, in_turns(asked, effort.num_rounds), strict=True):
        one.rounds = rounds


def _seconds_of(ask: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    ask()
    return time.perf_counter() - start_s


def _fresh_rounds(
    case: Case, task: Task, environments: Environments, effort: Effort
) -> list[Measured]:
    """Starts the processes of a side for each of its rounds, and asks them once."""
    measured = [Measured(side, {}) for side in (case.ours, *case.references)]

    def ask(one: Measured) -> tuple[int, Answers]:
        begin_s = time.monotonic()
        with Fleet(one.side, environments) as fleet:
            one.versions |= fleet.read_answers(effort.start_limit_s)[0]["versions"]
            answers = fleet.ask(task.question(task.least), effort.answer_limit_s)
            from_start_s = time.monotonic() - begin_s
        one.first = [{} for _ in answers]
        return task.least, [{**answer, "from_start_s": from_start_s} for answer in answers]

    asked = [functools.partial(ask, one) for one in measured]
    found = in_turns(asked, effort.num_rounds, case.num_dropped)
    for one, rounds in zip(measured, found, strict=True):
        one.rounds = rounds
    return measured


class Run:
    """A benchmark under way: what it is asked for, and what was found so far."""

    def __init__(
        self,
        name: str,
        environments: Environments,
        effort: Effort,
        console: Console,
        *,
        only: str = "",
        places: Sequence[Place] = (Place("cpu", 1), Place("cpu", 2)),
        size_bytes: int = 10**9,
    ) -> None:
        self.name, self.environments, self.effort = name, environments, effort
        self.console, self.only, self.places, self.size_bytes = console, only, places, size_bytes
        self.rows: list[Row] = []
        self.versions: dict[str, dict[str, str]] = {}
        self.skipped: list[dict[str, str]] = []
        self.failures: list[dict[str, str]] = []

    def wants(self, name: str, *, is_main: bool = True) -> bool:
        """Returns True for what the command line asks for."""
        return self.only in name and (is_main or not self.effort.is_brief)

    def can_run(self, side: Side) -> bool:
        """Returns False if an interpreter is missing, and says so once."""
        reason = self.environments.why_not(side)
        told = {"side": side.name, "reason": reason or ""}
        if reason and told not in self.skipped:
            self.skipped.append(told)
            self.console.print(f"Skipped: {side.name}: {reason}.", markup=False)
        return reason is None

    @contextlib.contextmanager
    def failing(self, name: str) -> Generator[None]:
        """Notes a failure of a worker: the others go on."""
        try:
            yield
        except WorkerError as error:
            self.failures.append({"case": name, "error": str(error)})
            self.console.print(f"Failed: {name}\n{error}", style="red", markup=False)

    def compare_all(self, cases: Sequence[Case]) -> None:
        """Measures cases, as far as they are asked for."""
        wanted = [case for case in cases if self.wants(case.name, is_main=case.is_main)]
        for case in wanted[:1] if self.effort.is_smallest else wanted:
            self.compare(case)

    def compare(self, case: Case, num_rounds: int | None = None) -> None:
        """Measures a case as far as it can run here, and adds its rows."""
        for task, (ours, *references) in self.measure(case, num_rounds):
            for title, figure in task.figures.items():
                name = ": ".join(filter(None, (case.name, task.name, title)))
                speeds = ours.figures(figure)
                for one in references:
                    row = make_row(name, speeds, one.figures(figure), one.side.name, task.unit)
                    mine, theirs = ours.details(task), one.details(task)
                    row["details"] = {key: [mine[key], theirs.get(key)] for key in mine}
                    row |= {} if case.wanted is None else {"wanted": case.wanted}
                    self.rows.append(row)

    def measure(
        self, case: Case, num_rounds: int | None = None
    ) -> list[tuple[Task, list[Measured]]]:
        """Measures a case; returns nothing if it fails, or no reference can run here."""
        references = tuple(filter(self.can_run, case.references))
        ours, tasks, effort = case.ours, case.tasks, self.effort
        if effort.is_smallest:
            if not self.can_run(ours):
                ours = dataclasses.replace(ours, environment="ours")
            references = references or (dataclasses.replace(ours, name=f"{ours.name}, again"),)
            tasks = tasks[:1]
        if not references or not self.can_run(ours):
            return []
        case = dataclasses.replace(case, ours=ours, references=references, tasks=tasks)
        effort = dataclasses.replace(effort, num_rounds=num_rounds or effort.num_rounds)
        found: list[tuple[Task, list[Measured]]] = []
        with self.failing(case.name), self.console.status(case.name):
            found = measure(case, self.environments, effort)
        for _, measured in found:
            for one in measured:
                self.versions.setdefault(one.side.environment, {}).update(one.versions)
        return found
