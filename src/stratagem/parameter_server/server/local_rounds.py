"""Rounds of local updates: settings that workers and servers share, and the count of steps."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class LocalRounds:
    """Settings of training between synchronizations, and of the servers' update.

    Args:
        period: number of steps of a round.
        num_workers: number of workers whose changes are averaged.
        num_pushes: number of pushes in which the servers receive the changes of all workers: 1 if
            they wait for all and average them, or else the number of workers.
        warmup_steps: number of first steps that are each a round.
        learning_rate: factor of an averaged change.
        momentum: Nesterov momentum of the outer optimizer; None for no such optimizer.
    """

    period: int
    num_workers: int
    num_pushes: int
    warmup_steps: int = 0
    learning_rate: float = 1.0
    momentum: float | None = None


class RoundCounter:
    """Counts the steps of a worker, to find the last one of each round."""

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds
        self._num_steps = 0
        self._position = 0

    def step(self) -> bool:
        """Counts a step; returns True if it is the last one of its round."""
        self._num_steps += 1
        self._position += 1
        is_end = self._num_steps <= self._rounds.warmup_steps
        if self._position == self._rounds.period:
            is_end, self._position = True, 0
        return is_end

    def restart(self) -> None:
        """Begins a whole round with the next step."""
        self._position = 0
