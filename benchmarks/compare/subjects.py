"""Work that both revisions do: training, parameter servers, and sums between processes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from benchmarks.allreduce.measuring import OUR_SIDE, our_variables
from benchmarks.allreduce.measuring import Cluster as SummingCluster
from benchmarks.allreduce.report import size_name
from benchmarks.cases import Case, Environments
from benchmarks.compare.revisions import Tree
from benchmarks.parameter_server import cases as server_cases
from benchmarks.worker_process import WorkerProcess

__all__ = ["ServerSubject", "Subject", "SumSubject", "TrainingSubject", "ask"]

Answers = Sequence[Mapping[str, Any]]


class Subject(Protocol):
    """Processes of one revision, and the cases that they can measure."""

    @property
    def cases(self) -> Sequence[str]:
        """Names of the cases."""
        ...

    def start(
        self, stack: contextlib.ExitStack, tree: Tree, environments: Environments
    ) -> list[WorkerProcess]:
        """Starts the processes, which end with the stack."""
        ...

    def question(self, case: str, amount: int) -> dict[str, Any]:
        """Returns the question for so much work."""
        ...

    def seconds(self, case: str, amount: int, answers: Answers) -> float:
        """Returns the seconds of one unit of work, from the answers of all processes."""
        ...


@dataclasses.dataclass(frozen=True)
class TrainingSubject:
    """Training by our side of a case."""

    case: Case

    @property
    def cases(self) -> Sequence[str]:
        """Name of the only case."""
        return (f"{self.case.name}: {self.case.ours.name}",)

    def start(
        self, stack: contextlib.ExitStack, tree: Tree, environments: Environments
    ) -> list[WorkerProcess]:
        """Starts the worker."""
        options = json.dumps(dataclasses.asdict(self.case.ours.options))
        return [stack.enter_context(tree.start(self.case.ours, options, environments))]

    def question(self, case: str, amount: int) -> dict[str, Any]:
        """Returns the question for `amount` epochs."""
        return {"epochs": amount}

    def seconds(self, case: str, amount: int, answers: Answers) -> float:
        """Returns the seconds of an epoch."""
        return answers[0]["seconds"] / amount


@dataclasses.dataclass(frozen=True)
class ServerSubject:
    """Cases of parameter servers that run on the same cluster by the same program."""

    server_cases: tuple[server_cases.Case, ...]

    @property
    def cases(self) -> Sequence[str]:
        """Names of the cases."""
        return [case.name for case in self.server_cases]

    def start(
        self, stack: contextlib.ExitStack, tree: Tree, environments: Environments
    ) -> list[WorkerProcess]:
        """Starts the process that starts the cluster."""
        first = self.server_cases[0]
        options = json.dumps(dataclasses.asdict(first.cluster))
        side = server_cases.OURS[first.kind]
        return [stack.enter_context(tree.start(side, options, environments))]

    def question(self, case: str, amount: int) -> dict[str, Any]:
        """Returns the question for `amount` calls."""
        (found,) = (one for one in self.server_cases if one.name == case)
        return found.question(amount)

    def seconds(self, case: str, amount: int, answers: Answers) -> float:
        """Returns the seconds of a call."""
        return answers[0]["seconds"] / amount


@dataclasses.dataclass(frozen=True)
class SumSubject:
    """Sums between processes, by the algorithm that AUTO chooses."""

    cluster: SummingCluster
    sizes_bytes: tuple[int, ...]

    @property
    def cases(self) -> Sequence[str]:
        """Names of the sizes."""
        return [f"{self.cluster}: {size_name(size)}" for size in self.sizes_bytes]

    def start(
        self, stack: contextlib.ExitStack, tree: Tree, environments: Environments
    ) -> list[WorkerProcess]:
        """Starts the processes of the cluster."""
        return [
            stack.enter_context(tree.start(OUR_SIDE, "{}", environments, **variables))
            for variables in our_variables(self.cluster)
        ]

    def question(self, case: str, amount: int) -> dict[str, Any]:
        """Returns the question for `amount` rounds of sums."""
        return {"bytes": self.sizes_bytes[self.cases.index(case)], "rounds": amount}

    def seconds(self, case: str, amount: int, answers: Answers) -> float:
        """Returns the seconds of a sum in the slowest process."""
        return max(answer["seconds"][answer["chosen"]] for answer in answers)


def ask(workers: Sequence[WorkerProcess], question: Mapping[str, Any], limit_s: float) -> Answers:
    """Asks all processes the same, and returns their answers."""
    for worker in workers:
        worker.tell(question)
    return [worker.read_answer(limit_s) for worker in workers]
