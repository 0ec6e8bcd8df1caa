"""Joins the states of all consumers of a job, so that it resumes where they stopped."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from stratagem.input.service.ranges import NumberRanges


class JoinedStates:
    """Positions of the consumers of one job, collected until all have joined."""

    def __init__(self) -> None:
        self._states: dict[str, Mapping[str, Any]] = {}

    def add(self, consumer: str, state: Mapping[str, Any]) -> None:
        """Adds the position of a consumer."""
        self._states[consumer] = state

    @property
    def consumers(self) -> Collection[str]:
        """Consumers that have joined."""
        return self._states.keys()

    @property
    def num_expected(self) -> int:
        """Number of consumers that the job had."""
        return max(state["num_consumers"] for state in self._states.values())

    @property
    def num_lanes(self) -> int | None:
        """Number of lanes of coordinated reads, None for other jobs."""
        return next(iter(self._states.values()))["num_lanes"]

    @property
    def is_complete(self) -> bool:
        """True if all consumers have joined."""
        return len(self._states) >= self.num_expected

    def done(self) -> NumberRanges:
        """Returns the splits of which no batch is left."""
        states = [*self._states.values()]
        done = NumberRanges()
        for state in states:
            done.update(NumberRanges(state["done"]))
        # A split is also done if each consumer has gone past its share.
        first, *others = (NumberRanges(state["passed"]) for state in states)
        for split in first:
            if all(split in other for other in others):
                done.add(split)
        return done

    def received(self) -> dict[str, list[list[int]]]:
        """Returns the batches that any consumer has, by split."""
        joined: dict[str, NumberRanges] = {}
        for state in self._states.values():
            for split, ranges in state["parts"].items():
                joined.setdefault(split, NumberRanges()).update(NumberRanges(ranges))
        return {split: numbers.as_json() for split, numbers in joined.items()}
