"""Sides for tests: fake ones, and real ones with few steps."""

from __future__ import annotations

from benchmarks.cases import Case, Side
from benchmarks.workers.protocol import WorkerOptions

__all__ = ["fake_case", "fake_side"]


def fake_side(name: str, behaviour: str = "trains", **variables: str) -> Side:
    return Side(
        name=name,
        module="tests.benchmarks.fake_worker",
        options=WorkerOptions(workload="mlp"),
        variables={"FAKE_BEHAVIOUR": behaviour, "FAKE_NAME": name, **variables},
    )


def fake_case(ours: Side, *references: Side) -> Case:
    return Case(name="case", ours=ours, references=references)
